-- Extends every name on this node to at least the ttl, if the owner still holds all of them here. Heals: with the arguments from the
-- fourth on it first writes the names that the node does not have, of a lease that a majority of the nodes holds.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their fence companions
--         2n+1 .. 3n     their metadata companions
--         3n+1 .. 4n     their counters (names may share one), only to heal
-- ARGV    1  the owner token
--         2  the ttl in ms; to heal the remaining time of the lease: it must not last longer here than on the other nodes
--         3  the ttl of a fence companion in ms
--         4  the attempt that the lease was granted to
--         5  the fencing token
--         6  the time of the grant in ms since 1970
--         7  the holder's process id
--         8  its host
--         9  the metadata, only for a lock with metadata
-- Answer  1 extended: the owner holds every name here
--         0 lost: a name has another holder, or was released (and nothing was changed)
--         2 missing: the node does not have some of the names, although they were neither released nor acquired by another
--           owner: it was down or lost its data, and may be healed (nothing was changed)

local owner, ttl, attempt = ARGV[1], tonumber(ARGV[2]), ARGV[4]
local n = #KEYS / (attempt and 4 or 3)

local missing = {}
for i = 1, n do
  local holder = redis.call('GET', KEYS[i])
  if holder then
    if string.match(holder, '^(%x+)%.%d+$') ~= owner then
      return 0
    end
  elseif string.match(redis.call('GET', KEYS[n + i]) or '', '^%d+ (%S+)') == owner .. '-free' then
    return 0
  else
    missing[i] = true
  end
end
if next(missing) and not attempt then
  return 2
end
for i = 1, n do
  local left = redis.call('PTTL', KEYS[i])
  if missing[i] then
    local record = string.format('%s %s %s %s:%s %s', ARGV[5], owner, ARGV[6], ARGV[7], attempt, ARGV[8])
    redis.call('SET', KEYS[i], owner .. '.' .. attempt, 'PX', ARGV[2])
    redis.call('SET', KEYS[n + i], record, 'PX', ARGV[3])
    -- Never lowered: this node may have proposed larger tokens to attempts that failed.
    redis.call('ZADD', KEYS[3 * n + i], 'GT', ARGV[5], 'last')
    if ARGV[9] then
      redis.call('SET', KEYS[n + n + i], owner .. ' ' .. ARGV[9], 'PX', ARGV[2])
    end
  -- A lease that already lasts longer is not changed, so that a late renewal does not shorten it. (-1: another tool removed the
  -- expiry.)
  elseif left >= 0 and left < ttl then
    redis.call('PEXPIRE', KEYS[i], ARGV[2])
    redis.call('PEXPIRE', KEYS[n + i], ARGV[3])
    redis.call('PEXPIRE', KEYS[n + n + i], ARGV[2])
  end
end
return 1
