import json
from pathlib import Path

from scheduler.simulate.moves import main, moves


def test_rendezvous_hashing_moves_what_it_must() -> None:
    for row in moves("hash", 8, 800, seed=1):
        assert 0.8 / 8 <= row["moved"] <= row["most"]


def test_turns_move_nearly_all() -> None:
    assert all(row["moved"] > 0.5 for row in moves("round-robin", 8, 100, seed=1))


def test_a_file_of_rows(tmp_path: Path) -> None:
    file = tmp_path / "moves.json"
    main(["--policies", "hash", "--executors", "4", "--adapters", "50", "--seeds", "1", "--json", str(file)])
    assert [row["scenario"] for row in json.loads(file.read_text())["rows"]] == ["homes-join", "homes-leave"]
