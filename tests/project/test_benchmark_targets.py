"""The benchmark of absent devices: which of them a collective joins, in every form that XLA prints."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "targets"))

from replica_groups import replica_groups

ROWS, COLUMNS = [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]
HALVES, PAIRS = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 2], [1, 3], [4, 6], [5, 7]]
DISTANT = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}", ROWS),
        ("channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true", ROWS),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}, dimensions={0}", ROWS),
        ("replica_groups=mesh[data=4,model=2] {model}", ROWS),
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", COLUMNS),
        ("replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}", COLUMNS),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", COLUMNS),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", COLUMNS),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", COLUMNS),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'b','c'}, dimensions={1}", HALVES),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", HALVES),
        ("replica_groups=mesh['a'=8] {'a':(2)2,'a':(4)2}", HALVES),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", DISTANT),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", DISTANT),
        # An all-to-all of one program, by the XLA of jax 0.10 and by that of jax 0.12.
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(0,2,1)) {'axis_1':(2)2}", PAIRS),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_1'}", PAIRS),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", [[*range(8)]]),
        ("source_target_pairs={{0,4},{1,5},{2,6},{3,7}}", DISTANT),
        ("replica_groups={}, to_apply=%add", [[*range(8)]]),
        ("to_apply=%add", [[*range(8)]]),
    ],
)
def test_the_groups_of_a_collective_are_read_in_every_form(text, groups):
    assert sorted(map(sorted, replica_groups(text, 8))) == groups


def test_a_form_that_nobody_knows_is_not_taken_for_all_devices():
    with pytest.raises(ValueError, match="unknown form"):
        replica_groups("replica_groups=spiral(8), dimensions={0}", 8)
