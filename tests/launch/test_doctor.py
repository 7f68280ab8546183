"""`distjax doctor` and `distjax info`."""

import json

import pytest

from distjax._src.launch import doctor, info


def test_info_is_what_a_report_needs(capsys, monkeypatch):
    monkeypatch.setenv("JAX_TRACEBACK_FILTERING", "off")
    monkeypatch.setenv("XLA_API_KEY", "secret")
    assert info.main([]) == 0
    text = capsys.readouterr().out
    assert "Installation:" in text and ["JAX_TRACEBACK_FILTERING", "off"] in [
        line.split() for line in text.splitlines()
    ]
    assert "secret" not in text
    assert info.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"Python", "distjax", "jax", "jaxlib", "devices", "memory", "variables"} <= set(found)
    assert found["devices"] == "8 cpu:cpu"


@pytest.mark.multiprocess
@pytest.mark.xdist_group("doctor")
def test_a_job_that_is_well(capsys, tmp_path):
    argv = ["--processes", "2", "--shared-dir", str(tmp_path), "--seconds", "60", "--json"]
    assert doctor.main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["processes"]) == 2 and found["wrong"] == []
    assert [row["bytes"] for row in found["all_reduce"]] == [4096, 1 << 18, 1 << 22, 1 << 24]
    assert all(row["bytes_per_second"] > 0 for row in found["all_reduce"])
    assert found["link_bytes_per_second"] > 0 and list(tmp_path.iterdir()) == []


def test_what_is_wrong_has_a_cure(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(doctor, "memory", lambda: (0.5, 8.0))
    assert doctor.main(["--shared-dir", str(tmp_path / "file")]) == 1
    text = capsys.readouterr().out
    assert "Wrong: 0.5 GiB of memory are left for process 0 on " in text
    assert "Cure: ps aux --sort=-rss" in text
    assert "does not see process 0's file in " in text and "All is well." not in text


def test_links_between_accelerators_are_not_those_of_sockets(monkeypatch):
    assert doctor._loopback_speed() > 0
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert doctor._loopback_speed() is None


def test_a_job_that_does_not_start(capsys, monkeypatch):
    code = "import sys; sys.exit('no disk')"
    monkeypatch.setattr(doctor, "Options", lambda command, count: make(("-c", code), count))
    make = __import__("distjax._src.launch.launcher", fromlist=["Options"]).Options
    assert doctor.main(["--processes", "1"]) == 1
    text = capsys.readouterr().out
    assert "Wrong: exit code 1, without an error; its last line: no disk\n" in text
    assert "Cure: distjax launch" in text


def test_processes_are_compared():
    first = {"who": "process 0 on a", "clock": 0.0, "available_gib": 8.0}
    other = {**first, "who": "process 1 on b", "clock": 9.0}
    assert list(doctor._compare([first, other])) == [
        {
            "what": "the clock of process 1 on b is 9.0 s off",
            "cure": "timedatectl set-ntp true",
        },
    ]
