"""Verification of a user's own model: every mapping against one process, as a command and a call.

`run.verify` is the entry. The suite of this package's own models lies beside this folder and shares
the starting of ranks with it.
"""

from lightning_fold.verify.product.result import MappingResult, VerifyResult
from lightning_fold.verify.product.run import verify

__all__ = ["MappingResult", "VerifyResult", "verify"]
