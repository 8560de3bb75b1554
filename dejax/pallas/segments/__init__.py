"""Segment reductions of plain arrays: where segments begin in sorted ids, and a reduction of any dtype and width."""
