-- Lets go of what the owner holds of the names, and of its places in their queues, and hands each name on.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their queues
--         2n+1 .. 3n     their fence companions
--         3n+1 .. 4n     their metadata companions, only when there is metadata
-- ARGV    1  the owner's token
--         2  the number of names
--         3  where waiters are told, without the process: holdfast:to:, in a cluster with a hash tag of the slot
--         4  the waiter's member of the queues, or nothing for who did not wait
--         5  how long the fence companions outlast what is let go of, in ms; 0 when they go with it
--         6  how long the names stay busy, in ms; without it they are free at once
-- Answer  1 when the owner held every name, else 0

local n, to, me = tonumber(ARGV[2]), ARGV[3], ARGV[4]

local held = 0
for i = 1, n do
  local key, queue, fence, metadata = KEYS[i], KEYS[n + i], KEYS[n + n + i], KEYS[n + n + n + i]
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
      local lasts = keep + fences_last
      if redis.call('PTTL', fence) < lasts then
        redis.call('PEXPIRE', fence, lasts)
      end
      if metadata then
        redis.call('PEXPIRE', metadata, keep)
      end
      if queued then
        -- The name may be free sooner than the waiters were told.
        pass(key, queue, to, nil, nil, true)
      end
    else
      if not (queued and pass(key, queue, to)) then
        redis.call('DEL', key)
      end
      if metadata then
        redis.call('DEL', metadata)
      end
      if fences_last == '0' then
        redis.call('DEL', fence)
      end
    end
  elseif queued and (not holder or holder == owner .. '-next') then
    -- Whoever was, or would have been, the next has given up.
    if not pass(key, queue, to) then
      redis.call('DEL', key)
    end
  end
end
return held == n and 1 or 0
