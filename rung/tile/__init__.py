"""Tile IR: a Loop IR kernel together with a mapping, which says where and when."""
