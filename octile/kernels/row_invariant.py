"""How GEMMs in high precision whose rows are independent divide K: the bits of all their kernels depend on it.

With fewer than WIDE columns K is divided into parts of CHUNK, whose products are added in their order.
"""

CHUNK, WIDE = 512, 2048
