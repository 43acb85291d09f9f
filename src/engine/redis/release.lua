-- Lets go of what the owner holds of the names, and of its places in their queues, and hands each name on.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their metadata companions
--         2n+1 .. 3n     their queues
--         3n+1 .. 4n     their fence companions, only when the names are to stay busy
-- ARGV    1  the owner's token
--         2  where waiters are told, without the process: holdfast:to:, in a cluster with a hash tag of the slot
--         3  the waiter's member of the queues, or nothing for who did not wait
--         4  how long the names stay busy, in ms; without it they are free at once
--         5  how long a fence companion lasts at least, in ms; with 4 only
-- Answer  1 when the owner held every name, else 0

local to, me, keep = ARGV[2], ARGV[3], ARGV[4]
local n = #KEYS / (keep and 4 or 3)

local held = 0
for i = 1, n do
  local key, queue = KEYS[i], KEYS[n + n + i]
  local holder = redis.call('GET', key)
  local queued = redis.call('EXISTS', queue) == 1
  if queued and me ~= '' then
    redis.call('ZREM', queue, me)
  end
  if holder == owner then
    held = held + 1
    if keep then
      -- Busy for everybody, this owner included: no claim has such a token.
      redis.call('SET', key, owner .. '-kept', 'PX', keep)
      redis.call('PEXPIRE', KEYS[n + i], keep)
      local fence = KEYS[n + n + n + i]
      if redis.call('PTTL', fence) < tonumber(ARGV[5]) then
        redis.call('PEXPIRE', fence, ARGV[5])
      end
      if queued then
        -- The name may be free sooner than the waiters were told.
        pass(key, queue, to, nil, nil, true)
      end
    elseif queued and pass(key, queue, to) then
      redis.call('DEL', KEYS[n + i])
    else
      redis.call('DEL', key, KEYS[n + i])
    end
  elseif queued and (not holder or holder == owner .. '-next') then
    -- Whoever was, or would have been, the next has given up.
    if not pass(key, queue, to) then
      redis.call('DEL', key)
    end
  end
end
return held == n and 1 or 0
