"""The BF16 terms of FP32 operands, and the products of which a gate's gradient of x consists (`octile.ops.gate`)."""

TERMS = 3  # BF16 numbers that sum to one FP32 number
# The terms of dy and of the weight that are multiplied for dx, pair by pair; the last three of dy, all that it has, are
# multiplied by x for the gradient of the weight, too. If the weight is BF16, the first three of both are left out.
DY_TERMS, WEIGHT_TERMS = [0, 1, 0, 2, 1, 0], [2, 1, 1, 0, 0, 0]
