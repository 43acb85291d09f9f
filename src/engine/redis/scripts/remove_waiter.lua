-- Removes a waiter that its process does not know from a queue: a dropped attempt was executed late, or a store restarted with
-- older data. Hands off what was handed to that waiter. A name that its owner holds by an attempt stays held.
--
-- KEYS    1  the lock key
--         2  its queue
--         3  its fence companion
-- ARGV    1  where waiters are notified, without the process: holdfast:to:, in a cluster with a hash tag of the slot
--         2  the waiter's member of the queue
--         3  how long the fence companion outlasts the release, in ms; 0 when it goes with it
--         4  until when it was the holder by the message, in ms since 1970; 0 for another message. A lease that was extended since
--            is that of a caller: this is a second message
-- Answer  1 when it was the holder, else 0; and 2 more when another call has to hand the name off

-- Answers until when an owner holds the lock, in ms since 1970, and whether no attempt has found its grant yet; nil if it does not.
held_until = held_until or function(lock, companion, owner)
  if redis.call('GET', lock) == owner then
    local till = math.floor(microseconds() / 1000) + redis.call('PTTL', lock)
    return till, string.match(redis.call('GET', companion) or '', '^%d+ ' .. owner .. ' %d+ %d+:0 ')
  end
end

local lock, queue, companion, me = KEYS[1], KEYS[2], KEYS[3], ARGV[2]
local owner = string.match(me, '^%x+:(%x+)')
local till, is_handed = held_until(lock, companion, owner)
if till and (math.abs(till - ARGV[4]) > 2 or not is_handed) then
  redis.call('ZREM', queue, me)
  mark_alive(queue, me)
  return 0
end
local held, more = release_one(lock, queue, companion, nil, owner, me, ARGV[1], ARGV[3])
return (held and 1 or 0) + (more and 2 or 0)
