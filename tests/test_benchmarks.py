"""The benchmarks' command line; what they measure is tested where they are used."""

import pytest

from benchmarks import __main__ as command


def test_the_command_line_knows_every_benchmark(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks", "--help"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert not ended.value.code
    said = capsys.readouterr().out
    for name in ("dispatch", "servers", "ray_servers", "servers_tensorflow", "over_processes"):
        assert name in said
