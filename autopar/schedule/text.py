"""The text form of a list of instructions, which parses back.

A heading names the phase of the instructions after it, and their microbatch where that is not 0; ``forward, once before all`` is that of
what runs before the first microbatch. Each other line is one instruction::

    forward
      0 start all_gather(dp) w@fwd: w -> w@fwd | node 1.5e-05 s 4096 B
      1 run mm: x w@fwd -> mm | compute 3e-06 s 128 B
      2 wait w@fwd: -> w@fwd
    backward, microbatch 3
      3 free: w@fwd | 4096 B

After the bar stand stream, seconds, bytes and launches where there are any. ``reading`` stands where the host reads
values back. ``over VALUE`` names memory that is taken over. Then ``late`` may stand.
The collective before a start's name is for readers only. Names that are not plain words are quoted as in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from autopar.errors import ScheduleError
from autopar.schedule.assignment import FORWARD, Moment
from autopar.schedule.instructions import BEFORE_ALL, KINDS, Instruction

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*":?|\S+')
"""A quoted or plain word."""
PLAIN = re.compile(r'[^\s"|]*[^\s"|:]')
"""A name that needs no quotes."""
RESERVED = frozenset({"->", "over", "late", "reading"})
"""Words of the form itself: names that read so are quoted."""
CALL = re.compile(r"\w+\(\S*\)")
"""A collective's kind and axes."""
NUMERIC = frozenset("0123456789.-")
"""The first character of a number."""
HEADING = re.compile(r"(?P<phase>\w+)(?:, microbatch (?P<microbatch>\d+)|(?P<before>, once before all))?")


def format_instructions(instructions: Iterable[Instruction], calls: Mapping[str, str] | None = None) -> str:
    """The text of a list.

    Args:
        calls: kind and axes of collectives, ``all_gather(dp)``, by id.
    """
    lines, last = list[str](), ""
    for item in instructions:
        microbatch = ", once before all" if item.microbatch == BEFORE_ALL else f", microbatch {item.microbatch}"
        heading = item.phase + (microbatch if item.microbatch else "")
        if heading != last:
            lines.append(heading)
        last = heading
        lines.append(_line(item, (calls or {}).get(item.of, "") if item.kind == "start" else ""))
    return "\n".join(lines)


def _line(item: Instruction, call: str) -> str:
    words = [str(item.id), item.kind, *([call] if call else []), *([_quoted(item.of)] if item.of else [])]
    values = [*map(_quoted, item.reads), *(["->", *map(_quoted, item.writes)] if item.writes else [])]
    facts = [
        *([_quoted_stream(item.stream)] if item.stream else []), *([f"{item.seconds!r} s"] if item.seconds else []),
        *([f"{item.bytes} B"] if item.bytes else []), *([f"{item.launches} launches"] if item.launches is not None else []),
        *(["reading"] if item.reads_back else []),
        *(["over", _quoted(item.over)] if item.over is not None else []),
        *(["late"] if item.late else []),
    ]  # fmt: skip
    return "  " + " ".join([*words[:-1], words[-1] + ":", *values, *(["|", *facts] if facts else [])])


def _quoted(name: str) -> str:
    plain = PLAIN.fullmatch(name) and name not in RESERVED and not CALL.fullmatch(name)
    return name if plain else json.dumps(name)


def _quoted_stream(name: str) -> str:
    """A stream's name: where it stands, seconds and bytes may stand too."""
    return json.dumps(name) if name[0] in NUMERIC else _quoted(name)


def parse(text: str) -> tuple[Instruction, ...]:
    """The instructions of a text: see the module. Lines without a number are numbered after the one before.

    Raises:
        ScheduleError: a line that is none, with its number.

    >>> [item.kind for item in parse("forward\\n  start all_gather(dp) w@fwd: w -> w@fwd | node 1e-05 s\\n  wait w@fwd: -> w@fwd")]
    ['start', 'wait']
    """
    found, heading = list[Instruction](), {"phase": FORWARD, "microbatch": 0}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.strip() and not line.startswith((" ", "\t")):
                heading = _heading(line.strip())
            elif line.strip():
                found.append(_instruction(TOKEN.findall(line), found[-1].id + 1 if found else 0, heading))
        except (ValueError, IndexError) as error:
            hint = "write a heading, `forward`, or an indented `NUMBER KIND NAME: READS -> WRITES | STREAM SECONDS s BYTES B`"
            raise ScheduleError(f"line {number} of the schedule is not an instruction ({error}): {line.strip()}", hint) from None
    return tuple(found)


def _heading(line: str) -> dict[str, Any]:
    match = HEADING.fullmatch(line)
    if match is None or match["phase"] not in get_args(Moment):
        raise ValueError(f"a heading is one of {', '.join(get_args(Moment))}")
    microbatch = BEFORE_ALL if match["before"] else int(match["microbatch"] or 0)
    return {"phase": match["phase"], "microbatch": microbatch}


def _instruction(tokens: list[str], number: int, heading: Mapping[str, Any]) -> Instruction:
    if tokens[0].isdigit():
        number, tokens = int(tokens[0]), tokens[1:]
    end = next((place for place, token in enumerate(tokens) if token.endswith(":")), -1)
    if end < 0:
        raise ValueError("no colon after its name")
    kind, *names = [*tokens[:end], *([tokens[end][:-1]] if tokens[end] != ":" else [])]
    if kind not in KINDS:
        raise ValueError(f"a kind is one of {', '.join(KINDS)}")
    if names and CALL.fullmatch(names[0]):
        names = names[1:]
    if len(names) > 1:
        raise ValueError("it has more than one name")
    bar = tokens.index("|") if "|" in tokens else len(tokens)
    values, facts = tokens[end + 1 : bar], tokens[bar + 1 :]
    arrow = values.index("->") if "->" in values else len(values)
    reads, writes = (tuple(map(_unquoted, part)) for part in (values[:arrow], values[arrow + 1 :]))
    name = _unquoted(names[0]) if names else ""
    return Instruction(number, kind, reads=reads, writes=writes, of=name, **heading, **dict(_facts(facts)))


def _facts(tokens: list[str]) -> Iterator[tuple[str, Any]]:
    place = 0
    while place < len(tokens):
        token, after = tokens[place], tokens[place + 1] if place + 1 < len(tokens) else ""
        if token == "late":
            yield "late", True
        elif token == "reading":
            yield "reads_back", True
        elif token == "over":
            yield "over", _unquoted(after)
        elif after == "s" and token[0] in NUMERIC:
            yield "seconds", float(token)
        elif after == "B" and token.isdigit():
            yield "bytes", int(token)
        elif after == "launches" and token.isdigit():
            yield "launches", int(token)
        else:
            yield "stream", _unquoted(token)
        place += 2 if token == "over" or (after in ("s", "B", "launches") and token[0] in NUMERIC) else 1


def _unquoted(word: str) -> str:
    return str(json.loads(word)) if word.startswith('"') else word
