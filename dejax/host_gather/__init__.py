"""Tables in host memory that compiled steps read and write in place."""

from dejax.host_gather.gather import check_errors, gather
from dejax.host_gather.table import HostTable, TableClosedError

__all__ = ["HostTable", "TableClosedError", "check_errors", "gather"]
