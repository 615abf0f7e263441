import pytest

from kernels.bench.table import layer_sums, speedup, table


def row(layer: str, ours: float, peer: float | None) -> dict[str, object]:
    times = {
        "ours_us": ours,
        "added_us": None,
        "peer_us": peer,
        "peer_tuned_us": None,
        "base_us": 9.0,
        "floor_us": 0.5,
    }
    return {"op": "lora_linear", "layer": layer, "tokens": 8, "adapters": 1, "rank": 16, **times}


def test_layers_are_summed_where_all_have_a_time() -> None:
    sums = layer_sums([row("o", 1.0, 4.0), row("down", 2.0, 2.0)])[16, 8, 1]
    assert (sums["ours_us"], sums["peer_us"], sums["added_us"]) == (3.0, 6.0, None)
    assert layer_sums([row("o", 1.0, 4.0), row("down", 2.0, None)])[16, 8, 1]["peer_us"] is None


def test_points_that_a_layer_lacks_are_left_out() -> None:
    rows = [row("o", 1.0, 4.0), row("down", 2.0, 2.0), {**row("o", 1.0, 4.0), "tokens": 64}]
    assert list(layer_sums(rows)) == [(16, 8, 1)]


def test_rows_of_other_measurements_stay_as_they_are() -> None:
    mixed = {**row("o", 1.0, None), "op": "mixed_ranks", "case": "shared_low"}
    assert table([mixed]) == "mixed_ranks o 8 1 16 1.0 None None None 9.0 0.5 shared_low\n"


def test_speedup_is_a_geometric_mean() -> None:
    rows = [row("o", 1.0, 4.0), row("down", 2.0, 2.0)]
    assert speedup(rows, "peer_us") == pytest.approx(2.0)
    assert speedup(rows, "peer_tuned_us") is None
    assert table(rows).splitlines()[-1] == "peer_us / ours_us: geometric mean 2.00, least 1.00"
