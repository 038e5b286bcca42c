"""Loop IR: kernels over named axes, without a schedule."""
