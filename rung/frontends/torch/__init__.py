"""`torch.compile(backend="rung")`: from ATen graphs to programs of Tensor IR.

In order: `backend` (what torch calls), `importer` (fx graph -> program of calls), `aten` (calls ->
Tensor IR, by a table of overloads), `calls` (running the calls that stay), `oracle` (the meaning of
a program on NumPy).
"""
