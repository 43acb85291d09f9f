-- Writes a lease that a majority of the nodes holds to a node that does not have it.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their fence companions
--         2n+1 .. 3n     their counters (names may share one)
--         3n+1 .. 4n     their metadata companions
-- ARGV    1  the owner token
--         2  the attempt that the lease was granted to
--         3  the remaining time of the lease in ms: it must not last longer here than on the other nodes
--         4  the ttl of a fence companion in ms
--         5  the fencing token
--         6  the time of the grant in ms since 1970
--         7  the holder's process id
--         8  its host
--         9  the metadata, only for a lock with metadata
-- Answer  1 the owner holds every name here now, 0 it does not: a name has another holder, or was released

local owner, ttl = ARGV[1], tonumber(ARGV[3])
local n = #KEYS / 4

local held = {}
for i = 1, n do
  local holder = redis.call('GET', KEYS[i])
  local token = string.match(redis.call('GET', KEYS[n + i]) or '', '^%d+ (%S+)')
  if holder then
    if string.match(holder, '^(%x+)%.%d+$') ~= owner then
      return 0
    end
    held[i] = true
  elseif token == owner .. '-free' then
    return 0
  end
end
for i = 1, n do
  if not held[i] then
    local record = string.format('%s %s %s %s:%s %s', ARGV[5], owner, ARGV[6], ARGV[7], ARGV[2], ARGV[8])
    redis.call('SET', KEYS[i], owner .. '.' .. ARGV[2], 'PX', ARGV[3])
    redis.call('SET', KEYS[n + i], record, 'PX', ARGV[4])
    -- Never lowered: this node may have proposed larger tokens to attempts that failed.
    redis.call('ZADD', KEYS[n + n + i], 'GT', ARGV[5], 'last')
    if ARGV[9] then
      redis.call('SET', KEYS[3 * n + i], owner .. ' ' .. ARGV[9], 'PX', ARGV[3])
    end
  elseif redis.call('PTTL', KEYS[i]) < ttl and redis.call('PTTL', KEYS[i]) >= 0 then
    redis.call('PEXPIRE', KEYS[i], ARGV[3])
    redis.call('PEXPIRE', KEYS[n + i], ARGV[4])
    redis.call('PEXPIRE', KEYS[3 * n + i], ARGV[3])
  end
end
return 1
