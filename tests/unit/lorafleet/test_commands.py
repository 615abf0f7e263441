"""What commands show and choose, without a server."""

import argparse
import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet import AdapterModule, AdapterSummary, AdapterVersion, Executor, Fleet, InvalidRequest, terminal
from lorafleet.cli import parser
from lorafleet.commands import bars, listing, push, report, top
from lorafleet.commands.aliases import targets

DAY = datetime.datetime(2026, 1, 2, 3, 4, 5)


def summary(name: str, **fields: object) -> AdapterSummary:
    given = {
        "tenant": "acme",
        "name": name,
        "digest": "sha256:1",
        "max_rank": 8,
        "num_bytes": 1000,
        "base_model": "acme/base-7b",
        "created_at": 5.0,
        "protected": False,
        "aliases": (),
        "state": "active",
        "quarantined": False,
    }
    return AdapterSummary(**given | fields)  # type: ignore[arg-type]


MANY = [
    summary("a", max_rank=64, num_bytes=5_000_000, created_at=3.0),
    summary("b", aliases=("latest", "prod"), num_bytes=900, base_model="acme/base-8b"),
    summary("c", state="draining", protected=True, created_at=9.0),
    summary("chat-d", quarantined=True, max_rank=16, num_bytes=2_000_000),
]


def listed(*options: str) -> str:
    args = parser().parse_args(["adapters", "list", *options])
    found = listing.arranged(listing.chosen(iter(MANY), args), args)
    return " ".join(each.name for each in found)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("", "a b c chat-d"),
        ("--match c*", "c chat-d"),
        ("--alias prod", "b"),
        ("--state draining", "c"),
        ("--protected", "c"),
        ("--quarantined", "chat-d"),
        ("--base 8b", "b"),
        ("--min-rank 16", "a chat-d"),
        ("--max-rank 8", "b c"),
        ("--max-rank 0", ""),
        ("--larger 2MB", "a chat-d"),
        ("--smaller 1.0kB", "b c"),
        ("--min-rank 16 --larger 3MB", "a"),
        ("--sort size", "b c chat-d a"),
        ("--sort size --reverse", "a chat-d c b"),
        ("--sort rank --reverse --limit 2", "a chat-d"),
        ("--sort pushed --limit 1", "a"),
        ("--limit 2", "a b"),
        ("--reverse --limit 1", "chat-d"),
    ],
)
def test_lists_are_filtered_and_sorted(options: str, names: str) -> None:
    assert listed(*options.split()) == names


def test_a_listing_without_order_takes_one_version_at_a_time() -> None:
    args = parser().parse_args(["adapters", "list", "--min-rank", "8", "--limit", "3"])
    endless = (summary(f"n{number}") for number in iter(int, 1))
    assert len(list(listing.arranged(listing.chosen(endless, args), args))) == 3


@given(st.integers(0, 10**13))
def test_sizes_can_be_written_as_they_are_shown(value: int) -> None:
    assert terminal.num_bytes(str(value)) == value
    assert abs(terminal.num_bytes(terminal.size(value)) - value) <= max(value * 0.06, 0)


@pytest.mark.parametrize("text", ["", "MB", "-1", "1 PB", "1.MB", "x"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        terminal.num_bytes(text)


def test_long_tables_are_written_in_pages_of_one_width(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.say_table(["NAME", "N"], ((f"name-{number}", number) for number in range(1200)))
    head, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 1200 and head.startswith("NAME      ")
    assert len({row.rindex(" ") for row in rows[:1000]}) <= 3
    terminal.say_table(["NAME", "N"], iter([]))
    assert capsys.readouterr().out == "NAME  N\n"


# ---- versions


def version(*modules: AdapterModule, **fields: object) -> AdapterVersion:
    given = {
        "tenant": "acme",
        "name": "x",
        "digest": "sha256:1",
        "modules": modules,
        "max_rank": 8,
        "dtypes": ("BF16",),
        "num_bytes": 3_400_000,
        "base_model": "b",
        "has_chat_template": False,
        "created_at": 0.0,
        "protected": False,
        "warnings": (),
        "aliases": (),
    }
    return AdapterVersion(**given | fields)  # type: ignore[arg-type]


Q0, Q1 = AdapterModule("layers.0.q_proj", 8, 2.0), AdapterModule("layers.1.q_proj", 8, 2.0)


def test_what_a_version_holds() -> None:
    head = AdapterModule("lm_head", 4, 0.5)
    assert report.content(version(Q0, Q1, head)) == (
        "modules: 3 (lm_head q_proj, layers: 2), rank 4, 8, scale 0.5, 2, BF16, 3.4 MB"
    )
    assert report.content(version(Q0, full_heads=("embed_tokens", "lm_head"), dtypes=("BF16", "F32"))) == (
        "modules: 1 (q_proj, layers: 1), rank 8, scale 2, full heads: embed_tokens lm_head, BF16+F32, 3.4 MB"
    )


def test_differences_of_two_versions() -> None:
    old = version(Q0, Q1)
    assert report.differences(old, old) == []
    assert report.differences(old, version(Q0, Q1, full_heads=("lm_head",))) == [
        "~ full heads: none -> lm_head"
    ]
    new = version(
        AdapterModule("layers.0.q_proj", 16, 1.0),
        AdapterModule("lm_head", 4, 0.5),
        num_bytes=10,
        has_chat_template=True,
        dtypes=("F32",),
    )
    assert report.differences(old, new) == [
        "~ dtypes: BF16 -> F32",
        "~ size: 3.4 MB -> 10 B",
        "~ chat template: of the base -> its own",
        "- layers.1.q_proj rank 8 scale 2",
        "+ lm_head rank 4 scale 0.5",
        "~ layers.0.q_proj: rank 8 -> 16, scale 2 -> 1",
    ]


def test_alias_targets_as_they_are_typed() -> None:
    given = parser().parse_args(["adapters", "alias", "set", "x@p", "v1=90", "v2=10"]).to
    assert targets(given) == {"v1": 90, "v2": 10}
    assert targets([("v1", None)]) == "v1"
    assert targets([("v1", 5)]) == {"v1": 5}
    for bad in ([("v1", 1), ("v2", None)], [("v1", 1), ("v1", 2)]):
        with pytest.raises(InvalidRequest):
            targets(bad)
    with pytest.raises(SystemExit):
        parser().parse_args(["adapters", "alias", "set", "x@p", "v1=many"])


# ---- many pushes


def test_adapters_are_found_under_their_own_names(tmp_path: Path) -> None:
    for name in ("Chat-A", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "Chat-A" / "adapter_config.json").write_text("{}")
    for name in ("b.tar.gz", "c.ZIP", "readme.md"):
        (tmp_path / name).write_text("")
    assert [name for name, _ in push.adapters_in(tmp_path)] == ["b", "c", "chat-a"]
    with pytest.raises(NotADirectoryError):
        push.adapters_in(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="holds no folder"):
        push.adapters_in(tmp_path / "notes")


def test_no_adapter_is_passed_over_because_of_its_form(tmp_path: Path) -> None:
    """Each is refused by its push, which says what to do."""
    (tmp_path / "deep" / "checkpoint-100").mkdir(parents=True)
    (tmp_path / "deep" / "checkpoint-100" / "adapter_model.safetensors").write_text("")
    (tmp_path / "mistral").mkdir()
    (tmp_path / "mistral" / "lora.safetensors").write_text("")
    for name in ("other.7z", "third.tar.zst"):
        (tmp_path / name).write_text("")
    assert [name for name, _ in push.adapters_in(tmp_path)] == ["deep", "mistral", "other", "third"]


def test_two_adapters_do_not_get_one_name(tmp_path: Path) -> None:
    (tmp_path / "Chat").mkdir()
    (tmp_path / "Chat" / "adapter_config.json").write_text("{}")
    (tmp_path / "chat.zip").write_text("")
    with pytest.raises(InvalidRequest, match=r"Chat and chat\.zip would both be 'chat'"):
        push.adapters_in(tmp_path)


def test_bars_for_many_at_once() -> None:
    progress = {"a": 1.0, "b": 0.5, "long-name": 0.25, "c": 0.0, "d": bars.FAILED}
    first, second, last = bars.render(progress, 24)
    assert first.startswith("b         ████████████░") and first.endswith(" 50%")
    assert second.startswith("long-name ██████░") and second.endswith(" 25%")
    assert last == "1 of 5 done, 1 refused"
    assert bars.render(progress, 3) == [first.replace("b        ", "b", 1), last + ", 1 more under way"]


# ---- top


def executor(address: str, **fields: object) -> Executor:
    given = {
        "address": address,
        "state": "ready",
        "detail": "",
        "instance_id": "i",
        "cordoned": False,
        "running": 3,
        "free_seats": 5,
        "free_kv_blocks": 9,
        "max_loras": 4,
        "resident": ("sha256:1", "sha256:2"),
        "max_seats": 8,
        "in_host": 7,
        "name": address,
    }
    return Executor(**given | fields)  # type: ignore[arg-type]


def test_the_picture_of_a_fleet() -> None:
    away = executor("b:1", state="connecting", detail="stream ended", running=0, max_seats=0, max_loras=0)
    first = Fleet((executor("a:1", slot_hits=10, host_hits=5, misses=5), away), 12, 2)
    lines = top.render(first, None, 50.0, DAY)
    assert lines[0] == "lorafleet 03:04:05   1 of 2 executors ready   3 running   12 waiting for 2 versions"
    row = "a:1 ready 3/8 ████░░░░░░ 2/4 █████░░░░░ 7 - 50 % 25 % - -"
    assert " ".join(lines[3].split()) == row
    assert lines[5] == "  b:1: stream ended"

    leaving = executor("c:1", name="pod-2", leaving=True, tripped=True, seat_limit=3)
    closed = Fleet(
        (executor("a:1", cordoned=True), executor("b:1", on_trial=True, detail="why"), leaving), 0, 0
    )
    lines = [" ".join(line.split()) for line in top.render(closed, None, 50.0, DAY)]
    assert lines[3].startswith("a:1 ready, cordoned 3/8") and lines[4].startswith("b:1 ready, on trial 3/8")
    assert lines[5].startswith("pod-2 ready, leaving, warming up, tripped 3/8") and lines[6] == "b:1: why"

    later = executor("a:1", slot_hits=19, host_hits=5, misses=6, page_in_mean=0.0123, page_in_max=0.2)
    second = Fleet((later,), 1, 1, (("sha256:" + "a" * 64, 40), ("", 2)))
    lines = top.render(second, (first, 50.0), 55.0, DAY)
    assert lines[3].split()[-10:] == ["7", "2.0", "90", "%", "0", "%", "12", "ms", "200", "ms"]
    assert lines[-3:] == ["longest queues", "      40  sha256:aaaaaaaaaaaa", "       2  base"]


def test_a_restarted_scheduler_counts_anew() -> None:
    before = Fleet((executor("a:1", slot_hits=100),), 0, 0)
    lines = top.render(Fleet((executor("a:1", slot_hits=4),), 0, 0), (before, 1.0), 2.0, DAY)
    assert " 4.0 " in lines[3] and "100 %" in lines[3]


def test_namespaces_of_all_commands_have_what_their_filters_read() -> None:
    args = argparse.Namespace(**vars(parser().parse_args(["adapters", "list"])))
    assert list(listing.chosen([], args)) == []
