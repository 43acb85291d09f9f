-- Releases a name, if the owner holds it, removes the owner's position in its queue, and hands the name off. Placed before
-- the scripts that do so. Answers whether the owner held the name, and whether another call has to hand it off, because the
-- queue has too many dead waiters for one call (`pass` in queue.lua).
--
-- `me`: the waiter's member of the queue, or nothing for a claim that did not wait. `to`: where waiters are notified, without
-- the process. `fences_last`: how long the fence companion outlasts the release, in ms, as text; 0 when it goes with it.
-- `keep`: how long the name stays busy, in ms; without it the name is free at once.

-- A fence companion lasts for no longer than `lasts` from now, however long the ttl was. Up to an hour more is accepted,
-- which saves a write.
local function shorten(fence, lasts)
  local left = redis.call('PTTL', fence)
  if left >= 0 and (left < lasts or left > lasts + 3600000) then
    redis.call('PEXPIRE', fence, lasts)
  end
end

local function release_one(key, queue, fence, metadata, owner, me, to, fences_last, keep)
  local holder = redis.call('GET', key)
  local queued = redis.call('EXISTS', queue) == 1
  if queued and me ~= '' then
    redis.call('ZREM', queue, me)
    mark_alive(queue, me)
  end
  local passed = false
  if holder ~= owner then
    -- A reservation can exist without a queue while its waiter is in the queue of a later name (acquire.lua).
    if queued and not holder or holder == owner .. '-next' then
      passed = pass(key, queue, fence, to)
      if not passed then
        redis.call('DEL', key)
      end
    elseif queued and #redis.call('ZRANGEBYSCORE', queue, 0, '+inf', 'LIMIT', 0, 1) == 0 then
      clear(queue)
    end
    return false, passed == nil
  end
  if keep then
    -- Busy for all owners, including this one: no claim has such a token.
    redis.call('SET', key, owner .. '-kept', 'PX', keep)
    shorten(fence, keep + fences_last)
    if metadata then
      redis.call('PEXPIRE', metadata, keep)
    end
    if queued then
      -- The name may become free earlier than the waiters expect.
      pass(key, queue, fence, to, nil, nil, true)
    end
  else
    passed = queued and pass(key, queue, fence, to)
    if not passed then
      redis.call('DEL', key)
    end
    if metadata then
      redis.call('DEL', metadata)
    end
    if passed == 'granted' then
      -- The fence companion is the next holder's.
    elseif fences_last == '0' then
      redis.call('DEL', fence)
    else
      shorten(fence, tonumber(fences_last))
    end
  end
  return true, passed == nil
end

