"""The log in Redis, for the gateways of several hosts. It implements only what kept generations need.

Each method is one script, which Redis runs as a whole, by its own clock. All keys share a prefix with a hash tag.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.store.log import LEASE_S, Append, Bounds, Lease, Standing, Tail

PREFIX = "pagewire:{generations}:"
TIMEOUT_S = 5.0

# KEYS[1]: the prefix of all keys. `about:ID` is a hash of the description and the lease of a generation,
# `entries:ID` the list of its entries; `ages` orders ids by the time of the last claim or release, `sizes` has their
# bytes, and `total` the sum of these.
_COMMON = """
local prefix = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function about(id) return prefix .. 'about:' .. id end
local function entries(id) return prefix .. 'entries:' .. id end
local ages, sizes, total = prefix .. 'ages', prefix .. 'sizes', prefix .. 'total'

local function is_free(id)
  return now >= tonumber(redis.call('HGET', about(id), 'leased_until') or '0')
end
local function grow(id, size)
  redis.call('HINCRBY', sizes, id, size)
  redis.call('INCRBY', total, size)
end
local function forget(id)
  redis.call('DECRBY', total, redis.call('HGET', sizes, id) or 0)
  redis.call('HDEL', sizes, id)
  redis.call('ZREM', ages, id)
  redis.call('DEL', about(id), entries(id))
end
local function oldest()
  local first = redis.call('ZRANGE', ages, 0, 0)[1]
  for start = 0, redis.call('ZCARD', ages), 100 do
    for _, id in ipairs(redis.call('ZRANGE', ages, start, start + 99)) do
      if is_free(id) then return id end
    end
  end
  return first
end
local function make_room(max_count, max_bytes)
  while redis.call('ZCARD', ages) > max_count or tonumber(redis.call('GET', total) or '0') > max_bytes do
    forget(oldest())
  end
end
"""

# ARGV: id, about, ttl in ms, bounds.
_BEGIN = """
local id, ttl = ARGV[1], tonumber(ARGV[3])
for _, old in ipairs(redis.call('ZRANGEBYSCORE', ages, '-inf', now - ttl)) do
  if is_free(old) then forget(old) end
end
if redis.call('HSETNX', about(id), 'about', ARGV[2]) == 1 then
  redis.call('ZADD', ages, now, id)
  grow(id, #ARGV[2])
end
local kept = redis.call('HGET', about(id), 'about')
make_room(tonumber(ARGV[4]), tonumber(ARGV[5]))
return kept
"""

# ARGV: id, ttl in ms.
_FIND = """
local touched = redis.call('ZSCORE', ages, ARGV[1])
if not touched or (tonumber(touched) <= now - ARGV[2] and is_free(ARGV[1])) then return false end
return redis.call('HGET', about(ARGV[1]), 'about')
"""

# ARGV: id, owner, lease in ms.
_CLAIM = """
local id = ARGV[1]
if redis.call('HEXISTS', about(id), 'about') == 0 or redis.call('HEXISTS', about(id), 'ended') == 1 then return 0 end
if not is_free(id) then return 0 end
redis.call('HSET', about(id), 'owner', ARGV[2], 'leased_until', now + ARGV[3])
redis.call('ZADD', ages, now, id)
return 1
"""

# ARGV: lease in ms, bounds, then id, owner, number, value, is_last of each entry. A call that is repeated because its
# answer was lost appends no entry twice.
_APPEND = """
local appended = {}
for i = 4, #ARGV, 5 do
  local id, owner, number, value, is_last = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4] == '1'
  local is_owner = redis.call('HGET', about(id), 'owner') == owner
  if is_owner and redis.call('LLEN', entries(id)) == number then
    redis.call('RPUSH', entries(id), value)
    grow(id, #value)
    if is_last then
      redis.call('HSET', about(id), 'ended', 1)
      redis.call('HDEL', about(id), 'owner', 'leased_until')
      redis.call('ZADD', ages, now, id)
    else
      redis.call('HSET', about(id), 'leased_until', now + ARGV[1])
    end
  end
  appended[#appended + 1] = is_owner and 1 or 0
end
make_room(tonumber(ARGV[2]), tonumber(ARGV[3]))
return appended
"""

# ARGV: id, number of the first entry.
_READ = """
local id = ARGV[1]
if redis.call('HEXISTS', about(id), 'about') == 0 then return false end
local ended = redis.call('HEXISTS', about(id), 'ended')
return {ended, is_free(id) and 1 or 0, redis.call('LRANGE', entries(id), ARGV[2], -1)}
"""

# ARGV: lease in ms, then id and owner of each.
_RENEW = """
local renewed = {}
for i = 2, #ARGV, 2 do
  local is_owner = redis.call('HGET', about(ARGV[i]), 'owner') == ARGV[i + 1]
  if is_owner then redis.call('HSET', about(ARGV[i]), 'leased_until', now + ARGV[1]) end
  renewed[#renewed + 1] = is_owner and 1 or 0
end
return renewed
"""

# ARGV: id, owner.
_RELEASE = """
if redis.call('HGET', about(ARGV[1]), 'owner') == ARGV[2] then
  redis.call('HDEL', about(ARGV[1]), 'owner', 'leased_until')
  redis.call('ZADD', ages, now, ARGV[1])
end
"""


class RedisLog:
    """A `Log`. Its entries are as durable as Redis is configured to be."""

    def __init__(self, url: str, bounds: Bounds, lease_s: float = LEASE_S) -> None:
        """Connects with the first call. Raises ValueError if `url` is not a URL of Redis."""
        self._redis = Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        self.lease_s = lease_s
        self._lease_ms = round(lease_s * 1000)
        self._ttl_ms = round(bounds.ttl_s * 1000)
        self._bounds = (bounds.count, bounds.bytes)
        scripts = (_BEGIN, _FIND, _CLAIM, _APPEND, _READ, _RENEW, _RELEASE)
        registered = [self._redis.register_script(_COMMON + script) for script in scripts]
        self._begin, self._find, self._claim, self._append, self._read, self._renew, self._release = registered

    async def begin(self, id: str, about: bytes) -> bytes:
        kept: bytes = await self._run(self._begin, id, about, self._ttl_ms, *self._bounds)
        return kept

    async def find(self, id: str) -> bytes | None:
        about: bytes | None = await self._run(self._find, id, self._ttl_ms)
        return about

    async def claim(self, id: str) -> Lease | None:
        lease = Lease("kept", id)
        return lease if await self._run(self._claim, id, lease.owner, self._lease_ms) else None

    async def append(self, entries: Sequence[Append]) -> list[bool]:
        values = [part for one in entries for part in _arguments(one)]
        return [bool(one) for one in await self._run(self._append, self._lease_ms, *self._bounds, *values)]

    async def read(self, id: str, first: int) -> Tail | None:
        answer = await self._run(self._read, id, first)
        return answer and Tail(answer[2], ended=bool(answer[0]), is_free=bool(answer[1]))

    async def renew(self, leases: Sequence[Lease]) -> list[Standing]:
        owners = [part for lease in leases for part in (lease.id, lease.owner)]
        return [Standing(one) for one in await self._run(self._renew, self._lease_ms, *owners)]

    async def release(self, lease: Lease) -> None:
        await self._run(self._release, lease.id, lease.owner)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _run(self, script: Callable[..., Awaitable[Any]], *args: object) -> Any:
        try:
            return await script(keys=[PREFIX], args=args)
        except (RedisError, OSError) as error:
            message = f"the store of generations with an Idempotency-Key (--generation-store) does not answer: {error}"
            raise ApiError(503, message) from error


def _arguments(entry: Append) -> tuple[str | bytes | int, ...]:
    return entry.lease.id, entry.lease.owner, entry.number, entry.value, int(entry.is_last)
