"""What gateways keep: documents and jobs, in a directory that all gateway processes of a host may share."""

from pagewire.gateway.store.database import Database, Schema
from pagewire.gateway.store.documents import Bound, Document, Documents
from pagewire.gateway.store.jobs import Jobs, Lease, LeaseLost
from pagewire.gateway.store.store import Store, data_directory

__all__ = [
    "Bound",
    "Database",
    "Document",
    "Documents",
    "Jobs",
    "Lease",
    "LeaseLost",
    "Schema",
    "Store",
    "data_directory",
]
