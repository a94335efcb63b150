"""Python's loops in the language of LLVM, whose compiler makes machine code of them in a fraction of a second.

numba, which comes with that compiler, takes ten times as long, nearly all of it with Python of its own: it finds out the types, and knows
what all of NumPy does. Here a function says its types, and does little:

- arguments and results are int, float, bool, ``Ints``, ``Floats``, NamedTuples of those; results also tuples;
- statements are assignments, ``if``, ``while``, ``for`` over a rising range or an array, ``break``, ``continue``, ``return``;
- values are numbers, arithmetic, comparisons, ``and``, ``or``, ``not``, ``a if b else c``, ``min``, ``max``, ``len``, entries and slices of
  arrays of one dimension, ``np.empty`` outside loops, whole numbers and other such functions of its module.

All else is refused. A variable keeps the kind of value that it is given first. What is said does the same as in Python, but that whole
numbers have 64 bits, and nothing is checked while it runs: an index is from 0 on and below the length, a slice lies within the array,
nothing is divided by 0, and a variable has been given a value.
"""

from __future__ import annotations

import ast
import inspect
import struct
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from solvers.arrays import Floats, Ints

WORDS: dict[Any, tuple[str, ...]] = {int: ("i64",), float: ("double",), bool: ("i1",), Ints: ("ptr", "i64"), Floats: ("ptr", "i64")}
"""The kinds of values, and LLVM's types of the words that hold one; of an array they say where its entries lie, and how many.
A tuple of kinds is one too, and so is a NamedTuple: they are held by the words of all their parts."""
ENTRY: dict[Any, Any] = {Ints: int, Floats: float}
"""The kind of an array's entries."""
ARITHMETIC = {ast.Add: ("add", "fadd"), ast.Sub: ("sub", "fsub"), ast.Mult: ("mul", "fmul")}
ONLY_WHOLE = {ast.BitAnd: "and", ast.BitOr: "or", ast.RShift: "ashr"}
COMPARISON = {
    ast.Lt: ("slt", "olt"), ast.LtE: ("sle", "ole"), ast.Gt: ("sgt", "ogt"), ast.GtE: ("sge", "oge"), ast.Eq: ("eq", "oeq"),
    ast.NotEq: ("ne", "une"),
}  # fmt: skip
"""LLVM's instructions for whole numbers and for floats."""
CASTS = {(bool, int): "zext i1 {} to i64", (bool, float): "uitofp i1 {} to double", (int, float): "sitofp i64 {} to double"}
"""And those that make of a number one of another kind, which can hold it."""


def leaves(kind: Any) -> list[Any]:
    """The numbers and arrays of which a kind consists, in order."""
    return [kind] if kind in WORDS else [leaf for part in parts(kind) for leaf in leaves(part)]


def parts(kind: Any) -> tuple[Any, ...]:
    return kind if isinstance(kind, tuple) else tuple(get_type_hints(kind).values())


def types(kind: Any) -> list[str]:
    """LLVM's types of a kind's words."""
    return [word for leaf in leaves(kind) for word in WORDS[leaf]]


def together(kind: Any) -> str:
    """LLVM's type of a result."""
    return f"{{{', '.join(types(kind))}}}"


def signature(function: Callable[..., Any]) -> tuple[dict[str, Any], Any]:
    """The kinds of a function's arguments, and that of its result: an empty tuple where there is none."""
    hints = get_type_hints(function)
    result = hints.pop("return")
    if result is type(None):
        return hints, ()
    return hints, get_args(result) if get_origin(result) is tuple else result


def symbol(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def translated(function: Callable[..., Any]) -> str:
    """The function, and those that it calls, in LLVM's language."""
    known: dict[str, str] = {}
    Translation(function, known)
    return "\n".join(["declare ptr @malloc(i64)", "declare void @free(ptr)", *known.values()])


def refusal(node: ast.AST) -> TypeError:
    return TypeError(f"this is not translated to machine code: {ast.unparse(node)}")


class Value(NamedTuple):
    kind: Any
    words: tuple[str, ...]


class Translation:
    """One function's lines; functions that it calls are added to ``known``, by name."""

    def __init__(self, function: Callable[..., Any], known: dict[str, str]) -> None:
        self.names, self.known = function.__globals__, known
        known[symbol(function)] = ""  # it may call itself
        self.lines: list[str] = []
        self.beginning: list[str] = []
        self.allocated: list[str] = []
        self.variables: dict[str, Value] = {}
        self.loops: list[tuple[str, str]] = []  # where continue and break go
        self.count, self.block, self.ended = 0, "begin", False
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        arguments, self.kind = signature(function)
        self.result = self.room(self.kind)
        taken = []
        for name, kind in arguments.items():
            value = Value(kind, tuple(f"%{name}.{place}" for place in range(len(types(kind)))))
            taken += [f"{word} {at}" for word, at in zip(types(kind), value.words, strict=True)]
            self.assign(ast.Name(name), value)
        self.run(tree.body)
        self.go("end")
        self.start("end")
        for slot in self.allocated:
            self.emit(f"call void @free(ptr {self.load('ptr', slot)})")
        returned, last = together(self.kind), "undef"
        for place, (word, slot) in enumerate(zip(types(self.kind), self.result.words, strict=True)):
            last = self.new(f"insertvalue {returned} {last}, {word} {self.load(word, slot)}, {place}")
        head = f"define internal {returned} @{symbol(function)}({', '.join(taken)}) nounwind {{\nbegin:"
        known[symbol(function)] = "\n".join([head, *self.beginning, *self.lines, f"  ret {returned} {last}\n}}"])

    # Lines.

    def emit(self, line: str) -> None:
        self.lines.append("  " + line)

    def new(self, line: str) -> str:
        """The word that an instruction gives."""
        self.count += 1
        self.emit(f"%v{self.count} = {line}")
        return f"%v{self.count}"

    def load(self, word: str, at: str) -> str:
        return self.new(f"load {word}, ptr {at}")

    def labels(self, *names: str) -> list[str]:
        self.count += 1
        return [f"{name}{self.count}" for name in names]

    def start(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.block, self.ended = label, False

    def go(self, label: str, condition: str = "", otherwise: str = "") -> None:
        """Go on at a label; nothing where this place cannot be reached."""
        if not self.ended:
            self.emit(f"br i1 {condition}, label %{label}, label %{otherwise}" if condition else f"br label %{label}")
        self.ended = True

    def room(self, kind: Any) -> Value:
        """Places in memory for the words of a variable."""
        self.count += 1
        slots = tuple(f"%room{self.count}.{place}" for place in range(len(types(kind))))
        self.beginning += [f"  {slot} = alloca {word}" for slot, word in zip(slots, types(kind), strict=True)]
        return Value(kind, slots)

    def write(self, room: Value, value: Value) -> None:
        value = self.cast(value, room.kind)
        for word, slot, at in zip(types(room.kind), room.words, value.words, strict=True):
            self.emit(f"store {word} {at}, ptr {slot}")

    # Statements.

    def run(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if self.ended:
                return  # behind a return, a break or a continue
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(ast.Constant(str())) | ast.Pass():
                pass
            case ast.Expr(value):
                self.value(value)
            case ast.Assign([target], value):
                self.assign(target, self.value(value))
            case ast.AugAssign(target, operator, value):
                self.assign(target, self.arithmetic(operator, self.value(target), self.value(value), node))
            case ast.Return(value):
                if value is not None:
                    self.write(self.result, self.value(value))
                self.go("end")
            case ast.If(test, body, otherwise):
                yes, no, after = self.labels("yes", "no", "after")
                self.go(yes, self.truth(test), no)
                for label, branch in ((yes, body), (no, otherwise)):
                    self.start(label)
                    self.run(branch)
                    self.go(after)
                self.start(after)
            case ast.While(test, body, []):
                again, inside, after = self.labels("again", "inside", "after")
                self.go(again)
                self.start(again)
                self.go(inside, self.truth(test), after)
                self.start(inside)
                self.repeat(body, again, after)
            case ast.For(target, over, body, []):
                self.count_through(target, over, body, node)
            case ast.Continue():
                self.go(self.loops[-1][0])
            case ast.Break():
                self.go(self.loops[-1][1])
            case _:
                raise refusal(node)

    def repeat(self, body: list[ast.stmt], following: str, after: str) -> None:
        """What a loop does each time, which goes on at ``following``; and what comes ``after`` it begins."""
        self.loops.append((following, after))
        self.run(body)
        self.loops.pop()
        self.go(following)
        self.start(after)

    def count_through(self, target: ast.expr, over: ast.expr, body: list[ast.stmt], node: ast.stmt) -> None:
        """A loop over a range that rises, or over an array."""
        array = None
        match over:
            case ast.Call(ast.Name("range"), [end], []):
                bounds = [Value(int, ("0",)), self.value(end), Value(int, ("1",))]
            case ast.Call(ast.Name("range"), [begin, end], []):
                bounds = [self.value(begin), self.value(end), Value(int, ("1",))]
            case ast.Call(ast.Name("range"), [begin, end, step], []):
                bounds = [self.value(begin), self.value(end), self.value(step)]
            case _:
                array = self.value(over)
                if array.kind not in ENTRY:
                    raise refusal(node)
                bounds = [Value(int, ("0",)), Value(int, array.words[1:]), Value(int, ("1",))]
        place = self.room(int)
        self.write(place, self.arithmetic(ast.Sub(), bounds[0], bounds[2], node))
        following, inside, after = self.labels("following", "inside", "after")
        self.go(following)
        self.start(following)
        at = self.arithmetic(ast.Add(), Value(int, (self.load("i64", place.words[0]),)), bounds[2], node)
        self.write(place, at)
        self.go(inside, self.new(f"icmp slt i64 {at.words[0]}, {self.cast(bounds[1], int).words[0]}"), after)
        self.start(inside)
        self.assign(target, self.entry(array, at) if array else at)
        self.repeat(body, following, after)

    def assign(self, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name(name):
                if name not in self.variables:
                    self.variables[name] = self.room(value.kind)
                self.write(self.variables[name], value)
            case ast.Tuple(targets) if isinstance(value.kind, tuple) and len(targets) == len(value.kind):
                for one, part in zip(targets, self.split(value), strict=True):
                    self.assign(one, part)
            case ast.Subscript(array, index) if not isinstance(index, ast.UnaryOp | ast.Slice):
                found = self.value(array)
                self.write(Value(ENTRY[found.kind], (self.address(found, self.value(index)),)), value)
            case _:
                raise refusal(target)

    # Values.

    def value(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant(bool(number)):
                return Value(bool, ("true" if number else "false",))
            case ast.Constant(int() | float() as number):
                return self.constant(number, node)
            case ast.Name(name) if name in self.variables:
                kind, slots = self.variables[name]
                return Value(kind, tuple(self.load(word, slot) for word, slot in zip(types(kind), slots, strict=True)))
            case ast.Name(name):
                return self.constant(self.names.get(name), node)
            case ast.Tuple(nodes):
                values = [self.value(one) for one in nodes]
                return Value(tuple(value.kind for value in values), tuple(word for value in values for word in value.words))
            case ast.Attribute(owner, name):
                value = self.value(owner)
                place: int = value.kind._fields.index(name)
                return self.split(value)[place]
            case ast.Subscript(array, ast.Slice(begin, end, None)):
                return self.slice(self.value(array), begin, end)
            case ast.Subscript(array, index) if not isinstance(index, ast.UnaryOp):
                return self.entry(self.value(array), self.value(index))
            case ast.BinOp(left, operator, right):
                return self.arithmetic(operator, self.value(left), self.value(right), node)
            case ast.UnaryOp(ast.USub(), operand):
                return self.arithmetic(ast.Sub(), Value(int, ("0",)), self.value(operand), node)
            case ast.UnaryOp(ast.Not(), operand):
                return Value(bool, (self.new(f"xor i1 {self.truth(operand)}, true"),))
            case ast.Compare(left, [operator], [right]):
                return self.compare(operator, self.value(left), self.value(right), node)
            case ast.BoolOp(operator, [first, second, *others]):
                rest = ast.BoolOp(operator, [second, *others]) if others else second  # a and b and c is a and (b and c)
                if isinstance(operator, ast.And):
                    return self.either(first, rest, ast.Constant(False))
                return self.either(first, ast.Constant(True), rest)
            case ast.IfExp(test, yes, no):
                return self.either(test, yes, no)
            case ast.Call(function, arguments, keywords):
                return self.call(function, arguments, keywords, node)
        raise refusal(node)

    def truth(self, node: ast.expr) -> str:
        value = self.value(node)
        if value.kind is int:
            return self.new(f"icmp ne i64 {value.words[0]}, 0")
        if value.kind is not bool:
            raise refusal(node)
        return value.words[0]

    def constant(self, number: object, node: ast.expr) -> Value:
        if isinstance(number, float):
            return Value(float, (f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}",))
        if isinstance(number, int):
            return Value(int, (str(int(number)),))
        raise refusal(node)

    def split(self, value: Value) -> list[Value]:
        found, at = [], 0
        for kind in parts(value.kind):
            found.append(Value(kind, value.words[at : at + len(types(kind))]))
            at += len(types(kind))
        return found

    def cast(self, value: Value, kind: Any) -> Value:
        """The value as one of a kind that can hold it."""
        if value.kind == kind:
            return value
        if isinstance(kind, tuple) and isinstance(value.kind, tuple) and len(kind) == len(value.kind):
            given = [self.cast(part, one) for part, one in zip(self.split(value), kind, strict=True)]
            return Value(kind, tuple(word for part in given for word in part.words))
        if (value.kind, kind) not in CASTS:
            raise TypeError(f"a value of {value.kind} where one of {kind} belongs")
        return Value(kind, (self.new(CASTS[value.kind, kind].format(value.words[0])),))

    def alike(self, *values: Value) -> tuple[Any, list[str]]:
        """Numbers as those of one kind, and their words."""
        kind = float if any(value.kind is float for value in values) else int
        return kind, [self.cast(value, kind).words[0] for value in values]

    def arithmetic(self, operator: ast.operator, left: Value, right: Value, node: ast.AST) -> Value:
        kind, (a, b) = self.alike(left, right)
        match operator:
            case ast.Div():
                return Value(float, (self.new(f"fdiv double {self.cast(left, float).words[0]}, {self.cast(right, float).words[0]}"),))
            case ast.FloorDiv() if kind is int:  # LLVM's rounds towards 0: one less where a rest has another sign than b
                rest = self.new(f"srem i64 {a}, {b}")
                unlike = self.new(f"icmp slt i64 {self.new(f'xor i64 {rest}, {b}')}, 0")
                less = Value(bool, (self.new(f"and i1 {unlike}, {self.new(f'icmp ne i64 {rest}, 0')}"),))
                return self.arithmetic(ast.Sub(), Value(int, (self.new(f"sdiv i64 {a}, {b}"),)), less, node)
            case ast.BitAnd() | ast.BitOr() | ast.RShift() if kind is int:
                return Value(int, (self.new(f"{ONLY_WHOLE[type(operator)]} i64 {a}, {b}"),))
            case ast.Add() | ast.Sub() | ast.Mult():
                whole, broken = ARITHMETIC[type(operator)]
                return Value(kind, (self.new(f"{whole} i64 {a}, {b}" if kind is int else f"{broken} double {a}, {b}"),))
        raise refusal(node)

    def compare(self, operator: ast.cmpop, left: Value, right: Value, node: ast.AST) -> Value:
        if type(operator) not in COMPARISON:
            raise refusal(node)
        kind, (a, b) = self.alike(left, right)
        whole, broken = COMPARISON[type(operator)]
        return Value(bool, (self.new(f"icmp {whole} i64 {a}, {b}" if kind is int else f"fcmp {broken} double {a}, {b}"),))

    def either(self, test: ast.expr, yes: ast.expr, no: ast.expr) -> Value:
        """One of two values, of which only that is computed."""
        first, second, after = self.labels("yes", "no", "after")
        self.go(first, self.truth(test), second)
        self.start(first)
        one, ends = self.value(yes), self.block
        self.go(after)
        self.start(second)
        other, other_ends = self.value(no), self.block
        self.go(after)
        self.start(after)
        if one.kind != other.kind:
            raise refusal(test)
        words = zip(types(one.kind), one.words, other.words, strict=True)
        return Value(one.kind, tuple(self.new(f"phi {word} [{a}, %{ends}], [{b}, %{other_ends}]") for word, a, b in words))

    def address(self, array: Value, index: Value) -> str:
        (word,) = types(ENTRY[array.kind])
        return self.new(f"getelementptr inbounds {word}, ptr {array.words[0]}, i64 {self.cast(index, int).words[0]}")

    def entry(self, array: Value, index: Value) -> Value:
        kind = ENTRY[array.kind]
        return Value(kind, (self.load(types(kind)[0], self.address(array, index)),))

    def slice(self, array: Value, begin: ast.expr | None, end: ast.expr | None) -> Value:
        first = self.value(begin) if begin else Value(int, ("0",))
        last = self.value(end) if end else Value(int, array.words[1:])
        return Value(array.kind, (self.address(array, first), self.arithmetic(ast.Sub(), last, first, ast.Slice()).words[0]))

    def call(self, function: ast.expr, nodes: list[ast.expr], keywords: list[ast.keyword], node: ast.expr) -> Value:
        name = ast.unparse(function)
        if name == "np.empty" and not self.loops and len(nodes) == 1:
            return self.allocate(self.value(nodes[0]), [ast.unparse(keyword) for keyword in keywords], node)
        if keywords:
            raise refusal(node)
        values = [self.value(one) for one in nodes]
        if name == "len":
            return Value(int, values[0].words[1:])
        if name in {"int", "float", "bool"}:
            return self.cast(values[0], {"int": int, "float": float, "bool": bool}[name])
        if name in {"min", "max"}:
            kind, (best, *others) = self.alike(*values)
            for other in others:
                better = self.compare(ast.Lt() if name == "min" else ast.Gt(), Value(kind, (other,)), Value(kind, (best,)), node)
                best = self.new(f"select i1 {better.words[0]}, {types(kind)[0]} {other}, {types(kind)[0]} {best}")
            return Value(kind, (best,))
        called = inspect.unwrap(self.names.get(name, len))
        if not inspect.isfunction(called):
            raise refusal(node)
        if symbol(called) not in self.known:
            Translation(called, self.known)
        arguments, kind = signature(called)
        given = [self.cast(value, wanted) for value, wanted in zip(values, arguments.values(), strict=True)]
        words = ", ".join(f"{word} {at}" for value in given for word, at in zip(types(value.kind), value.words, strict=True))
        returned = together(kind)
        found = self.new(f"call {returned} @{symbol(called)}({words})")
        return Value(kind, tuple(self.new(f"extractvalue {returned} {found}, {place}") for place in range(len(types(kind)))))

    def allocate(self, length: Value, keywords: list[str], node: ast.expr) -> Value:
        """An array of its own, which is given back when the function ends."""
        if keywords not in ([], ["dtype=np.int64"]):
            raise refusal(node)
        slot = self.room(int).words[0]
        self.beginning.append(f"  store ptr null, ptr {slot}")
        self.allocated.append(slot)
        found = self.new(f"call ptr @malloc(i64 {self.new(f'mul i64 {length.words[0]}, 8')})")
        self.emit(f"store ptr {found}, ptr {slot}")
        return Value(Ints if keywords else Floats, (found, *length.words))
