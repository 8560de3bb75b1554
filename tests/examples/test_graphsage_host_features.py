"""The GraphSAGE example learns, and both ways to gather its features train equally well."""

from examples.graphsage_host_features import main

SMALL = "--nodes 2000 --edges 20000 --width 20 --hidden 16 --classes 4 --batch 64 --fan-outs 4,3 --steps 150".split()


def test_it_learns_and_the_pipelines_agree() -> None:
    ours, theirs = main(SMALL), main([*SMALL, "--pipeline", "cpu"])
    assert ours["accuracy"] > 0.5
    assert abs(ours["accuracy"] - theirs["accuracy"]) < 0.05
