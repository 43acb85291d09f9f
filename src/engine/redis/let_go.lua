-- Lets go of a name, if it is the owner's, and of the owner's place in its queue, and hands the name on. Stands in front of
-- the scripts that do so. Answers whether the name was the owner's.
--
-- `me`: the waiter's member of the queue, or nothing for who did not wait. `to`: where waiters are told, without the process.
-- `fences_last`: how long the fence companion outlasts what is let go of, in ms, as text; 0 when it goes with it. `keep`: how
-- long the name stays busy, in ms; without it the name is free at once.

local function let_go(key, queue, fence, metadata, owner, me, to, fences_last, keep)
  local holder = redis.call('GET', key)
  local queued = redis.call('EXISTS', queue) == 1
  if queued and me ~= '' then
    redis.call('ZREM', queue, me)
  end
  if holder ~= owner then
    if queued and (not holder or holder == owner .. '-next') and not pass(key, queue, to) then
      -- Whoever was, or would have been, the next has given up.
      redis.call('DEL', key)
    end
    return false
  end
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
  return true
end

