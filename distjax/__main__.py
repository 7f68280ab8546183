"""`python -m distjax` and the command `distjax`: launch, plan, info, doctor."""

from distjax._src.launch.commands import main

if __name__ == "__main__":
    main()
