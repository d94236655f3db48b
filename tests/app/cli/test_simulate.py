"""`roundhouse simulate` replays a list in its own process; nothing listens anywhere."""

from __future__ import annotations

import gzip
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from app.cli import replay_svg, root_command
from app.cli.client import JSON
from tests import command_line

#: One device: a holds it for 10 s, then b for 20 s.
LIST = "timestamp,duration,num_gpus,gpu_time,cluster\n0,10,1,10,a\n1,20,1,20,b\n"

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("ROUNDHOUSE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("ROUNDHOUSE_KEY", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("ROUNDHOUSE_HOME", str(tmp_path / "nobody"))
    monkeypatch.chdir(tmp_path)
    return lambda *words: command_line.invoke(["simulate", *words])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "jobs.csv"
    file.write_text(LIST)
    return file


def told(result: Result) -> JSON:
    assert result.exit_code == 0, result.output
    found: JSON = json.loads(result.stdout)
    return found


def test_trace_is_replayed_under_each_policy(run: Run, trace: Path) -> None:
    value = told(run(trace, "-d", 1, "--policy", "fifo,fair", "--slice", 1e6, "-o", "json"))
    assert (value["jobs"], value["left_out"]) == (2, 0)
    assert [r["policy"] for r in value["runs"]] == ["fifo", "fair"]
    for replayed in value["runs"]:
        assert replayed["lost_s"]["max"] == 9.0  # b came at 1 s and began at 10 s
        assert replayed["lasted_s"] == 30.0
        assert replayed["devices"] == {"cuda": 1}


def test_compressed_trace_gives_the_same_result(run: Run, trace: Path, tmp_path: Path) -> None:
    packed = tmp_path / "jobs.csv.gz"
    packed.write_bytes(gzip.compress(LIST.encode()))
    plain, again = (told(run(file, "-d", "1", "-o", "json")) for file in (trace, packed))
    for value in (plain, again):
        del value["trace"], value["runs"][0]["took_s"]
    assert plain == again


def test_until_option_stops_the_clock(run: Run, trace: Path) -> None:
    [replayed] = told(run(trace, "-d", 1, "--until", 15 / 86400, "-o", "json"))["runs"]
    assert (replayed["lasted_s"], replayed["finished"]) == (15.0, 1)


def test_weights_and_quotas_are_applied(run: Run, trace: Path) -> None:
    words = ("--weights", "a=1,b=3", "--guarantee", "b=cuda:1", "--limit", "a=*:1")
    [replayed] = told(run(trace, "-d", 2, *words, "-o", "json"))["runs"]
    assert {t["tenant"]: t["weight"] for t in replayed["tenants"]} == {"a": 1.0, "b": 3.0}


@pytest.mark.parametrize("option", ["--guarantee", "--limit"])
def test_quota_of_a_kind_without_devices_is_refused(run: Run, trace: Path, option: str) -> None:
    result = run(trace, "-d", 2, option, "a=cpu:1")
    assert result.exit_code == 2
    assert "there are no cpu devices; the kinds are cuda" in " ".join(result.output.split())


def test_table_says_what_it_counts(run: Run, trace: Path) -> None:
    result = run(trace, "-d", "cuda=1", "--policy", "fifo", "-o", "wide")
    assert result.exit_code == 0, result.output
    for words in ("LOST, MEAN", "fifo, by tenant", "end - arrival - work", "66.7%"):
        assert words in result.stdout


def test_plot_is_one_svg_file_without_other_files(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "odd.csv"
    file.write_text(LIST.replace(",b\n", ',"<b> & ""co"""\n'))
    result = run(file, "-d", 1, "--policy", "fair", "--policy", "fifo", "--plot", "out.svg")
    assert result.exit_code == 0, result.output
    assert "Wrote the plot to out.svg." in result.stderr
    root = ElementTree.parse(tmp_path / "out.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any(word.startswith('<b> & "co": ') for word in words)
    assert any(word.startswith("fifo: mean ") for word in words)
    text = (tmp_path / "out.svg").read_text()
    assert "prefers-color-scheme: dark" in text
    assert "href" not in text


def test_plot_of_many_tenants_sums_up_the_smallest() -> None:
    held = {f"t{n:02}": [float(n)] for n in range(1, 12)}
    shown = replay_svg._largest(held)
    assert [name for name, _ in shown] == [
        "t11",
        "t10",
        "t09",
        "t08",
        "t07",
        "t06",
        "t05",
        replay_svg.REST,
    ]
    assert shown[-1][1] == [1.0 + 2 + 3 + 4]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("jobs.csv",), "--devices is needed"),
        (("jobs.csv", "-d", "0"), "must be a number of devices above 0"),
        (("jobs.csv", "-d", "cpu=4"), ""),
        (("jobs.csv", "-d", "many"), "must be a number or KIND=N"),
        (("jobs.csv", "-d", "1", "--policy", "best"), "; got 'best'"),
        (("jobs.csv", "-d", "1", "--weights", "c=2"), "unknown tenant 'c'; the tenants are a, b"),
        (("jobs.csv", "-d", "1", "--weights", "a"), "must be TENANT=WEIGHT"),
        (("jobs.csv", "-d", "1", "--limit", "a=4"), "must be TENANT=KIND:DEVICES"),
        (("jobs.csv", "-d", "1", "--tier", "gold"), "; got 'gold'"),
        (("nothing.csv", "-d", "1"), "cannot read nothing.csv"),
    ],
)
def test_wrong_use_is_explained(run: Run, trace: Path, words: tuple[str, ...], said: str) -> None:
    result = run(*words)
    if not said:
        assert result.exit_code == 0, result.output
        return
    assert result.exit_code == root_command.USAGE, result.output
    flat = " ".join(result.stderr.replace("│", " ").split())
    assert said in flat


def test_fault_in_a_trace_is_reported_with_file_and_line(run: Run, trace: Path) -> None:
    trace.write_text(LIST + "2,-1,1,1,b\n")
    result = run(trace, "-d", 1)
    assert result.exit_code == root_command.USAGE
    assert "jobs.csv, line 4: duration must be seconds above 0; got '-1'" in result.stderr


def test_replay_of_history_takes_one_policy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDHOUSE_KEY", "rh_key")
    result = run("history", "--policy", "fair,fifo")
    assert result.exit_code == root_command.USAGE


def test_trace_is_replayed_over_thousands_of_half_lives(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "long.csv"
    file.write_text("timestamp,duration,num_gpus,cluster\n0,100000,1,a\n0,100000,1,b\n")
    value = told(run(file, "-d", 1, "--half-life", 0.0005, "--slice", 60, "-o", "json"))
    assert value["runs"][0]["finished"] == 2


@pytest.mark.parametrize(
    ("option", "number"),
    [
        ("--half-life", "inf"),
        ("--half-life", "nan"),
        ("--half-life", "-1"),
        ("--half-life", "0.000001"),
        ("--half-life", "1e300"),
        ("--slice", "inf"),
        ("--pause-s", "inf"),
        ("--resume-s", "nan"),
        ("--resize-s", "inf"),
        ("--until", "inf"),
    ],
)
def test_number_out_of_bounds_is_refused_with_its_option(
    run: Run, trace: Path, option: str, number: str
) -> None:
    result = run(trace, "-d", 1, option, number)
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output
