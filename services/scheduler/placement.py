"""Which replica takes a waiting request.

Requests wait at the scheduler, never at a replica, and are placed when a replica decides a step that has room for them.
"""

from collections.abc import Sequence

from pagewire.services.scheduler.replica import Replica
from pagewire.services.scheduler.request import Request
from pagewire.services.scheduler.suspicion import is_suspect


def is_placed_on(replica: Replica, request: Request, replicas: Sequence[Replica]) -> bool:
    """Whether this replica, which decides its next step, is to take this waiting request, whose turn it is.

    The one with the fewest running requests is, among those with room for it; the first named among equals. Where none
    has room, each may take it as soon as it can make some; a suspect, for which others have to pause, is the least busy
    one's, of those without another suspect if there are some. Those with other weights than it needs do not count, and
    those whose executors are about to end take nobody as long as there are others.
    """
    if len(replicas) == 1:
        return True
    present = [other for other in replicas if other.info and other.suits(request)]
    staying = [other for other in present if not other.is_leaving] or present
    if replica not in staying:
        return False
    able = [other for other in staying if other.has_room_for(request)]
    if not able and is_suspect(request):
        able = [other for other in staying if not other.has_suspect] or staying
    return not able or min(able, key=lambda other: (other.num_running, other.replica_id)) is replica
