"""Standard streams, JSON, and text from files that must not reach a terminal as it is."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from autopar.cost_models import load_hardware
from autopar.files import write_whole
from autopar.plan import Plan
from tests.cli.running import autopar, refused

ESCAPE = "\x1b[31m"


def test_dash_is_the_standard_stream(plan_file: Path) -> None:
    words = [sys.executable, "-m", "autopar"]
    shown = subprocess.run([*words, "show", "-", "--json"], input=plan_file.read_bytes(), capture_output=True, check=True)
    assert json.loads(shown.stdout) == json.loads(plan_file.read_text())
    page = subprocess.run([*words, "show", str(plan_file), "--html", "-"], capture_output=True, check=True).stdout
    assert page.startswith(b"<!doctype html>") and page.rstrip().endswith(b"</html>")


@pytest.mark.parametrize("ascii_alone", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_a_terminal_of_ascii_alone(plan_file: Path, tmp_path: Path, ascii_alone: dict[str, str]) -> None:
    """Words and JSON have escapes there, pages are in UTF-8 as in a file."""
    named = tmp_path / "named.json"
    named.write_text(plan_file.read_text().replace('"target": "', '"target": "\u00e9\U0001f600 '), encoding="utf-8")
    environment, command = {**os.environ, **ascii_alone}, [sys.executable, "-m", "autopar", "show", str(named)]
    ways = [], ["--json"], ["--html", "-"]
    table, text, page = (subprocess.run([*command, *more], env=environment, capture_output=True, check=True).stdout for more in ways)
    assert b"\\u00e9\\ud83d\\ude00 " in table and table.isascii() and text.isascii()
    assert json.loads(text) == json.loads(named.read_text(encoding="utf-8")) and "\u00e9\U0001f600 " in page.decode("utf-8")


def test_a_byte_order_mark_is_no_part_of_a_file(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marked, hardware = tmp_path / "marked.json", tmp_path / "marked.toml"
    marked.write_bytes(b"\xef\xbb\xbf" + plan_file.read_bytes())
    assert autopar(capsys, "diff", marked, plan_file).out == "the plans choose the same\n"
    hardware.write_bytes(b"\xef\xbb\xbf" + autopar(capsys, "hardware", "cpu-cluster").out.encode())
    assert load_hardware(str(hardware)).name == "cpu-cluster"


def test_what_is_no_plan_yet_is_told_from_one_that_is_broken(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two plans of one stream, an empty stream, and a model in place of its plan."""
    refused(autopar(capsys, "diff", "-", "-"), 2, "two plans cannot both be read from the standard input")
    command = [sys.executable, "-m", "autopar", "show", "-"]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ran.returncode == 3 and ran.stderr.startswith("error: the standard input is empty, where the plan should be\nhint: "), ran
    for model in ("zoo:mlp", "model.py:target"):
        for words in (("show", model), ("explain", model, "head.weight")):
            refused(ran := autopar(capsys, *words), 3, "No such file or directory")
            assert f"hint: make its plan first: autopar plan {model} --mesh" in ran.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_an_error_in_words(plan_file: Path) -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run([sys.executable, "-m", "autopar", "show", str(plan_file)], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 3 and ran.stderr.startswith("error: cannot write to the standard output"), ran.stderr
    assert "Traceback" not in ran.stderr


def test_what_is_no_file_is_written_to_and_stays(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe, as a device would be: a file renamed to its place would take ``/dev/null`` from the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "some words")
    assert os.read(reader, 100) == b"some words" and pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]
    os.close(reader)
    words = [sys.executable, "-m", "autopar", "show", str(plan_file), "--html", str(tmp_path / "out")]
    (tmp_path / "out").symlink_to("/proc/self/fd/1")  # as /dev/stdout
    page = subprocess.run(words, capture_output=True, check=True).stdout
    assert b"<!doctype html>" in page and (tmp_path / "out").is_symlink()


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_a_closed_stream_is_none_that_is_written_to(plan_file: Path, closed: str) -> None:
    command = f'"{sys.executable}" -m autopar show "{plan_file}" {closed}'
    ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stderr == "" and (ran.stdout == "") == (closed == ">&-"), ran


def test_a_link_leads_to_the_file_that_is_written(tmp_path: Path) -> None:
    link = tmp_path / "latest.json"
    (tmp_path / "plans").mkdir()
    link.symlink_to("plans/one.json")
    for text in ("first", "second"):
        write_whole(link, text)
        assert link.is_symlink() and (tmp_path / "plans" / "one.json").read_text() == text
    assert [path.name for path in (tmp_path / "plans").iterdir()] == ["one.json"]


@pytest.mark.parametrize("room", [True, False], ids=["room elsewhere", "room nowhere"])
def test_what_took_long_to_make_is_not_lost_for_want_of_room(
    room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere, output = tmp_path / "elsewhere", tmp_path / "plan.json"
    elsewhere.mkdir()
    output.write_text("the old plan")
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))

    def full(handle: int) -> None:
        if not room or not os.readlink(f"/proc/self/fd/{handle}").startswith(str(elsewhere)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    ran = autopar(capsys, "plan", "zoo:mlp", "--mesh", "dp=2", "-o", output)
    printed, ran = ran.out, replace(ran, out=ran.out if room else "")
    refused(ran, 3, f"cannot write {output}: No space left on device; the result is ")
    kept = list(elsewhere.glob("plan-*"))
    assert len(kept) == room and (not room or str(kept[0]) in ran.err)
    assert Plan.from_json(kept[0].read_text() if room else printed).model.target == "zoo:mlp"
    assert output.read_text() == "the old plan" and {*tmp_path.iterdir()} == {elsewhere, output}


def test_escapes_in_a_file_are_shown_not_obeyed(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(plan_file.read_text())
    data["model"]["target"] = f"{ESCAPE}red"
    (tmp_path / "red.json").write_text(json.dumps(data))
    out = autopar(capsys, "show", tmp_path / "red.json").out
    assert "\\x1b[31mred" in out and "\x1b" not in out
    data["mode\x1b"] = 1
    (tmp_path / "wrong.json").write_text(json.dumps(data))
    ran = autopar(capsys, "show", tmp_path / "wrong.json")
    refused(ran, 3, "mode\\x1b")
    assert "\x1b" not in ran.err


def test_json_of_what_reads_plans(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(autopar(capsys, "show", plan_file, "--json").out)["schema"] == "autopar.plan/2"
    assert json.loads(autopar(capsys, "check", plan_file, "--json").out) == {"plan": str(plan_file), "holds": True, "differences": []}
    assert json.loads(autopar(capsys, "diff", plan_file, plan_file, "--json").out)["same"] is True
    assert "parameter" in json.loads(autopar(capsys, "explain", plan_file, "layers.0.weight", "--json").out)["lines"][0]


def test_what_is_read_is_not_written_over(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = plan_file.read_bytes()
    refused(autopar(capsys, "show", plan_file, "--html", plan_file), 2, "is what is read")
    refused(autopar(capsys, "solve", plan_file, "-o", plan_file), 2, "is what is read")
    assert plan_file.read_bytes() == before


HOSTILE = {"deep": ("[" * 200_000 + "]" * 200_000, "nested too deep"), "long": ('{"a": ' + "9" * 6000 + "}", "cannot be read")}


@pytest.mark.parametrize(("text", "said"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(text)
    refused(autopar(capsys, "show", tmp_path / "plan.json"), 3, said)


def test_verbs_near_by_and_short_help(capsys: pytest.CaptureFixture[str]) -> None:
    refused(autopar(capsys, "shwo"), 2, "there is no command 'shwo'")
    assert "did you mean autopar show?" in autopar(capsys, "shwo").err
    assert autopar(capsys, "show", "-h").status == 0


def test_the_schema_names_every_key_of_a_plan(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(autopar(capsys, "schema", "plan").out)
    data = json.loads(plan_file.read_text())
    assert schema["$id"] == data["schema"] and set(data) <= set(schema["properties"]) and set(schema["required"]) <= set(data)
    refused(autopar(capsys, "schema", "planet"), 2, "no schema of 'planet'")


def test_completion_knows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    from autopar.cli.completion import options_of
    from autopar.cli.main import VERBS

    for verb in VERBS:
        text = autopar(capsys, verb, "--help").out
        assert set(re.findall(r"^ +(?:-\w, )?(--[\w-]+)", text, re.MULTILINE)) == set(options_of(verb)), verb
    script = autopar(capsys, "completion", "bash").out
    asked = "COMP_WORDS=(autopar plan --me); COMP_CWORD=2; _autopar; echo ${COMPREPLY[@]}"
    found = subprocess.run(["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True).stdout
    assert found.split() == ["--mesh", "--memory"]
    assert "complete -c autopar" in autopar(capsys, "completion", "fish").out and "bashcompinit" in autopar(capsys, "completion", "zsh").out
    refused(autopar(capsys, "completion", "tcsh"), 2, "no completion for the shell 'tcsh'")


def test_ctrl_c_while_a_command_is_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autopar.cli.main.import_module", interrupted)
    refused(autopar(capsys, "plan", "zoo:mlp", "--mesh", "2"), 130, "interrupted before there was an answer\nhint: once there is a plan")
    refused(autopar(capsys, "demo"), 130, "interrupted before there was an answer\nhint: no process is left of it")


def test_ctrl_c_ends_a_command_at_once() -> None:
    """Whatever Python would still wait for."""
    lines = """
        import signal, sys, threading, time
        from autopar.cli import main
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background is begun with it ignored
        def command():
            threading.Thread(target=time.sleep, args=(600,)).start()
            signal.raise_signal(signal.SIGINT)
        main.import_module = lambda name: type("Verb", (), {"demo": staticmethod(command)})
        sys.argv[1:] = ["demo"]
        main.main()
    """
    ran = subprocess.run([sys.executable, "-c", dedent(lines)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 130 and ran.stderr.startswith("error: interrupted"), ran.stderr
