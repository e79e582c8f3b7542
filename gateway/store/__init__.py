"""The data directory of gateways: documents, and jobs with their logs. All gateway processes of a host may share it."""

from pagewire.gateway.store.documents import Bound, Document, Documents, Work
from pagewire.gateway.store.leases import Jobs, Leases
from pagewire.gateway.store.log import Bounds, Lease, LeaseLost, Log
from pagewire.gateway.store.sqlite_log import held
from pagewire.gateway.store.store import Store, data_directory, open_log

__all__ = [
    "Bound",
    "Bounds",
    "Document",
    "Documents",
    "Jobs",
    "Lease",
    "LeaseLost",
    "Leases",
    "Log",
    "Store",
    "Work",
    "data_directory",
    "held",
    "open_log",
]
