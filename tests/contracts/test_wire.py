"""The stubs are what the protos say, and the protos never break an older peer."""

from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "protos/lorafleet/v1").glob("*.proto"))


def run_protoc(*flags: str) -> None:
    assert protoc.main(["protoc", f"-I{ROOT / 'protos'}", *flags, *map(str, PROTOS)]) == 0


@pytest.fixture(scope="module")
def current(tmp_path_factory: pytest.TempPathFactory) -> FileDescriptorSet:
    out = tmp_path_factory.mktemp("wire") / "current.binpb"
    run_protoc(f"--descriptor_set_out={out}", "--include_source_info")
    return FileDescriptorSet.FromString(out.read_bytes())


def test_stubs_match_protos(tmp_path: Path) -> None:
    run_protoc(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}")
    fresh = {p.name: p.read_text() for p in (tmp_path / "lorafleet/v1").iterdir()}
    committed = {p.name: p.read_text() for p in (ROOT / "lorafleet/v1").glob("*_pb2*.py*")}
    assert committed == fresh, "run `make stubs` and commit what it writes"


def test_wire_is_compatible_with_the_baseline(current: FileDescriptorSet) -> None:
    baseline = FileDescriptorSet.FromString((ROOT / "protos/baseline.binpb").read_bytes())
    missing = wire_facts(baseline) - wire_facts(current)
    assert not missing, f"removed, renumbered or retyped: {sorted(missing)}"


def test_the_baseline_holds_everything_there_is(current: FileDescriptorSet) -> None:
    baseline = FileDescriptorSet.FromString((ROOT / "protos/baseline.binpb").read_bytes())
    new = wire_facts(current) - wire_facts(baseline)
    assert not new, f"run `make wire-baseline` and commit it, to hold from now on: {sorted(new)}"


def test_compatibility_test_can_fail(current: FileDescriptorSet) -> None:
    changed = FileDescriptorSet.FromString(current.SerializeToString())
    changed.file[0].message_type[0].field[0].number += 100
    assert wire_facts(current) - wire_facts(changed)


def test_every_element_has_a_comment(current: FileDescriptorSet) -> None:
    bare = [f"{file.name}: {name}" for file in current.file for name in uncommented(file)]
    assert not bare, f"without a comment: {bare}"


def wire_facts(files: FileDescriptorSet) -> set[str]:
    """One line for each promise that the wire makes."""
    facts: set[str] = set()
    for file in files.file:
        for message in file.message_type:
            facts |= message_facts(f"{file.package}.{message.name}", message)
        for enum in file.enum_type:
            facts |= enum_facts(f"{file.package}.{enum.name}", enum)
        for service in file.service:
            for m in service.method:
                streams = f"{m.client_streaming:d}{m.server_streaming:d}"
                facts.add(f"rpc {service.name}.{m.name} {m.input_type} {m.output_type} streams={streams}")
    return facts


def message_facts(name: str, message: DescriptorProto) -> set[str]:
    def field_fact(field: FieldDescriptorProto) -> str:
        oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else "-"
        kind = FieldDescriptorProto.Type.Name(field.type)
        label = FieldDescriptorProto.Label.Name(field.label)
        return f"field {name}.{field.name}={field.number} {kind} {field.type_name} {label} oneof={oneof}"

    facts = {field_fact(field) for field in message.field}
    for nested in message.nested_type:
        facts |= message_facts(f"{name}.{nested.name}", nested)
    for enum in message.enum_type:
        facts |= enum_facts(f"{name}.{enum.name}", enum)
    return facts


def enum_facts(name: str, enum: EnumDescriptorProto) -> set[str]:
    return {f"enum {name}.{value.name}={value.number}" for value in enum.value}


def uncommented(file: FileDescriptorProto) -> list[str]:
    """Names of messages, fields, enums, values, services and methods that no comment precedes."""
    commented = {tuple(loc.path) for loc in file.source_code_info.location if loc.leading_comments.strip()}
    # Paths are made of field numbers of FileDescriptorProto and its parts (descriptor.proto).
    elements = [
        *((4, i, message, 2, message.field) for i, message in enumerate(file.message_type)),
        *((5, i, enum, 2, enum.value) for i, enum in enumerate(file.enum_type)),
        *((6, i, service, 2, service.method) for i, service in enumerate(file.service)),
    ]
    bare = []
    for kind, i, element, part_kind, parts in elements:
        if (kind, i) not in commented:
            bare.append(element.name)
        bare += [
            f"{element.name}.{part.name}"
            for j, part in enumerate(parts)
            if (kind, i, part_kind, j) not in commented
        ]
    return bare
