"""`rung explain --html`: one page of everything that became of a function, which opens offline."""
