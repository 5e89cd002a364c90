"""SoftMetal's Metal.h against Apple's metal-cpp: no selector, type or number of ours may differ, nor be superfluous."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.softmetal.runner import ROOT
from tests.softmetal.wheel import headers

HEADER = ROOT / "tests" / "softmetal" / "Metal" / "Metal.h"


@dataclass
class Api:
    """What a header declares, in metal-cpp's spelling without `const`."""

    methods: dict[tuple[str, str], str] = field(default_factory=dict)
    """(class, selector) to "return(argument, …)"."""
    bases: dict[str, str] = field(default_factory=dict)
    enums: dict[str, tuple[str, dict[str, int]]] = field(default_factory=dict)
    """Name to underlying type and values."""
    structs: dict[str, list[str]] = field(default_factory=dict)
    makes: set[str] = field(default_factory=set)
    """Classes that the program itself makes with alloc and init."""
    aliases: dict[str, str] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)

    def find(self, name: str, selector: str) -> str | None:
        """The method of a class or of one that it inherits from."""
        while name:
            if (name, selector) in self.methods:
                return self.methods[name, selector]
            name = self.bases.get(name, "")
        return None


def number(text: str) -> int:
    value, _, shift = text.partition("<<")
    return int(value, 0) << int(shift or 0)


def split(arguments: str) -> list[str]:
    """Splits at commas outside brackets."""
    parts, depth = [""], 0
    for c in arguments:
        depth += (c in "(<[") - (c in ")>]")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts if part.strip()]


# ---- Ours

WORDS = {"NSUInteger": "NS::UInteger", "NSInteger": "NS::Integer", "BOOL": "bool"}


def ours_type(text: str) -> str:
    """`const id<MTLResource> *` to `MTL::Resource**`."""
    if "(^" in text:
        result, arguments = re.fullmatch(r"(.*?)\(\^\w*\)\((.*)\)", text.strip(), re.S).groups()  # type: ignore[union-attr]
        unnamed = [re.sub(r"(\W)\w+$", r"\1", argument) for argument in split(arguments)]
        return f"{ours_type(result)}(^)({','.join(map(ours_type, unnamed))})"
    text = re.sub(r"\bconst\b", "", text)
    text = re.sub(r"\bid<(MTL\w+)>", r"\1*", text)
    text = re.sub(r"\bMTL(\w+)", r"MTL::\1", text)
    text = re.sub(r"\b(NSUInteger|NSInteger|BOOL)\b", lambda m: WORDS[m[1]], text)
    text = re.sub(r"\bNS(?!::)(\w+)", r"NS::\1", text)
    return re.sub(r"\s+", "", text)


def balanced(text: str, start: int) -> int:
    """The end of the bracket that opens at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(text[start : start + 80])


def ours_methods(body: str) -> dict[str, str]:
    result = {}
    for found in re.finditer(r"^[-+]\s*\(", body, re.M):
        at = balanced(body, found.end() - 1)
        returned, rest = body[found.end() : at], body[at + 1 : body.index(";", at)]
        selector, arguments = "", []
        while ":" in rest:
            colon = rest.index(":")
            start = rest.index("(", colon)
            end = balanced(rest, start)
            selector += rest[:colon].split()[-1] + ":"
            arguments.append(ours_type(rest[start + 1 : end]))
            rest = rest[end + 1 :]
        result[selector or rest.strip()] = f"{ours_type(returned)}({', '.join(arguments)})"
    return result


def ours(text: str) -> Api:
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    api = Api()
    for type_, name, body in re.findall(r"NS_(?:ENUM|OPTIONS)\((\w+), MTL(\w+)\) \{(.*?)\}", text, re.S):
        values = re.findall(r"MTL(\w+) = ([^,]+)", body)
        api.enums[name] = WORDS[type_], {value: number(given) for value, given in values}
    for body, name in re.findall(r"typedef struct \{(.*?)\} MTL(\w+);", text, re.S):
        api.structs[name] = [WORDS[type_] + " " + member for type_, member in re.findall(r"(\w+) (\w+);", body)]
    declared = r"@(protocol|interface) MTL(\w+)(?: : NSObject)?(?: <(\w+)>)?(?: \{.*?\})?\s*?\n(.*?)@end"
    for kind, name, base, body in re.findall(declared, text, re.S):
        if kind == "interface":
            api.makes.add(name)
        if base and base != "NSObject":
            api.bases[name] = base.removeprefix("MTL")
        for selector, signature in ours_methods(body).items():
            api.methods[name, selector] = signature
    api.functions = set(re.findall(r"^id<\w+> (MTL\w+)\(", text, re.M))
    api.constants = set(re.findall(r"extern NSString \*const MTL(\w+);", text))
    return api


# ---- Apple's


def theirs_type(text: str, named: bool) -> str:
    """`const MTL::Buffer* const buffers[]` to `MTL::Buffer**`."""
    if "(^" in text:
        return re.sub(r"\(\^\w*\)", "(^)", re.sub(r"\s+", "", text))
    text = re.sub(r"\bconst\b", "", text).strip()
    array = text.endswith("[]")
    text = text.removesuffix("[]")
    if named:
        text = re.sub(r"\w+$", "", text)
    return re.sub(r"\s+", "", text) + "*" * array


def theirs(folder: Path) -> Api:
    api = Api()
    bridge = "".join((folder / name).read_text() for name in ("MTLHeaderBridge.hpp", "MTLPrivate.hpp"))
    selectors = dict(re.findall(r'_MTL_PRIVATE_DEF_SEL\((\w+),\s*"([^"]+)"\)', bridge))
    for path in sorted(folder.glob("*.hpp")):
        text = path.read_text()
        for type_, name, body in re.findall(r"_MTL_(?:ENUM|OPTIONS)\(([\w:]+), (\w+)\) \{(.*?)\}", text, re.S):
            values = re.findall(r"(\w+) = (\d+(?: << \d+)?),", body)
            api.enums[name] = type_, {value: number(given) for value, given in values}
        for name, base in re.findall(r"class (\w+) : public NS::\w+<\1(?:, (?:MTL::)?(\w+))?>", text):
            if base:
                api.bases[name] = base
        for name, body in re.findall(r"^struct (\w+)\n\{(.*?)\} _MTL_PACKED;", text, re.M | re.S):
            api.structs[name] = re.findall(r"^ +(\S+ \w+);", body, re.M)
        inline = r"_MTL_INLINE (.+?) MTL::(\w+)::(\w+)\(([^\n]*)\)(?: const)?\n\{(.*?)\n\}"
        for returned, name, method, arguments, body in re.findall(inline, text, re.S):
            if method == "alloc":
                api.makes.add(name)
            sent = re.search(r"_MTL_PRIVATE_SEL\((\w+)\)", body)
            if sent and sent[1] in selectors:
                types = [theirs_type(argument, True) for argument in split(arguments)]
                api.methods[name, selectors[sent[1]]] = f"{theirs_type(returned, False)}({', '.join(types)})"
        api.aliases |= dict(re.findall(r"using (\w+) = (uint64_t);", text))
        api.functions |= set(re.findall(r'extern "C" MTL::\w+\* (MTL\w+)\(', text))
        api.constants |= set(re.findall(r"_MTL_CONST\([\w:]+, (\w+)\)", text))
    for key, signature in api.methods.items():  # such as GPUAddress, which older SDKs do not have
        api.methods[key] = re.sub(r"MTL::(\w+)", lambda m: api.aliases.get(m[1], m[0]), signature)
    return api


# ---- Both


def differences(mine: Api, apple: Api) -> list[str]:
    found = []
    for (name, selector), signature in mine.methods.items():
        expected = apple.find(name, selector)
        if expected != signature:
            found.append(f"{name} {selector}: {signature}, Apple has {expected}")
    for name, (type_, values) in mine.enums.items():
        expected_type, expected_values = apple.enums.get(name, ("", {}))
        if type_ != expected_type:
            found.append(f"enum {name}: {type_}, Apple has {expected_type}")
        found += [
            f"{value} = {given}, Apple has {expected_values.get(value)}"
            for value, given in values.items()
            if expected_values.get(value) != given
        ]
    found += [f"{name} : {base}" for name, base in mine.bases.items() if apple.bases.get(name) != base]
    found += [f"struct {name}" for name, members in mine.structs.items() if apple.structs.get(name) != members]
    found += [f"{name} is not made with alloc and init" for name in mine.makes - apple.makes]
    found += [f"function {name}" for name in mine.functions - apple.functions]
    found += [f"constant {name}" for name in mine.constants - apple.constants]
    return found


@pytest.fixture(scope="module")
def apple() -> Api:
    return theirs(headers() / "metal_cpp" / "Metal")


def test_header__is_apples(apple: Api) -> None:
    assert differences(ours(HEADER.read_text()), apple) == []


def test_header__is_read_whole(apple: Api) -> None:
    """The two parsers have seen what there is: by numbers that a reader can count."""
    text, api = HEADER.read_text(), ours(HEADER.read_text())
    assert len(api.methods) == len(re.findall(r"^[-+] \(", text, re.M)) > 40
    assert len(api.enums) == len(re.findall(r"NS_ENUM|NS_OPTIONS", text)) > 8
    assert sum(len(values) for _, values in api.enums.values()) == len(re.findall(r"^    MTL\w+ = ", text, re.M))
    assert (api.structs, api.bases) == (
        {"Size": ["NS::UInteger width", "NS::UInteger height", "NS::UInteger depth"]},
        {"Buffer": "Resource", "ComputeCommandEncoder": "CommandEncoder"},
    )
    assert len(api.makes) == text.count("@interface") == 5
    assert api.functions == {"MTLCreateSystemDefaultDevice"}
    assert api.constants == {"CommandBufferEncoderInfoErrorKey"}
    assert len(apple.methods) > 1000 and len(apple.enums) > 80


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("offset:(NSUInteger)offset atIndex:", "atOffset:(NSUInteger)offset atIndex:", "setBuffer:atOffset:atIndex:"),
        ("- (uint64_t)gpuAddress;", "- (NSUInteger)gpuAddress;", "Buffer gpuAddress: NS::UInteger()"),
        ("length:(NSUInteger)length atIndex", "length:(int)length atIndex", "setBytes:length:atIndex:"),
        ("MTLDataTypeBool = 53", "MTLDataTypeBool = 54", "DataTypeBool = 54, Apple has 53"),
        ("NS_ENUM(NSInteger, MTLGPUFamily)", "NS_ENUM(NSUInteger, MTLGPUFamily)", "enum GPUFamily"),
        ("(void *pointer, NSUInteger length))", "(void *pointer, int length))", "newBufferWithBytesNoCopy"),
        ("@protocol MTLBuffer <MTLResource>", "@protocol MTLBuffer <MTLCommandEncoder>", "Buffer : CommandEncoder"),
        ("    NSUInteger depth;\n} MTLSize", "} MTLSize", "struct Size"),
        ("@protocol MTLLibrary <NSObject>", "@interface MTLLibrary : NSObject", "Library is not made"),
        ("MTLCommandBufferEncoderInfoErrorKey;", "MTLCommandBufferErrorKey;", "constant CommandBufferErrorKey"),
    ],
)
def test_comparison__sees_a_planted_difference(apple: Api, right: str, wrong: str, complaint: str) -> None:
    text = HEADER.read_text()
    assert right in text
    found = differences(ours(text.replace(right, wrong)), apple)
    assert any(complaint in one for one in found), found


def test_header__has_nothing_that_the_device_does_not_use() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "native" / "metal").glob("*.[mh]"))
    api = ours(HEADER.read_text())
    # The first part of a selector as it is written in a message; enums as soon as one of their values is.
    unused = [selector for _, selector in api.methods if not re.search(rf"\b{selector.split(':')[0]}\b", sources)]
    unused += [name for name, (_, values) in api.enums.items() if not any(f"MTL{value}" in sources for value in values)]
    assert unused == []
