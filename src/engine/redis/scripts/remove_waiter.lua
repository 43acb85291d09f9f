-- Removes a waiter that its process does not know from a queue: a dropped attempt was executed late, or a store restarted with
-- older data. Hands off what was handed to that waiter. A name that its owner holds by now stays held.
--
-- KEYS    1  the lock key
--         2  its queue
-- ARGV    1  where waiters are notified, without the process: holdfast:to:, in a cluster with a hash tag of the slot
--         2  the waiter's member of the queue
-- Answer  1 when the name was reserved for it, else 0; and 2 more when another call has to hand the name off

local lock, queue = KEYS[1], KEYS[2]
redis.call('ZREM', queue, ARGV[2])
mark_alive(queue, ARGV[2])
if redis.call('GET', lock) ~= string.match(ARGV[2], '^%x+:(%x+)') .. '-next' then
  return 0
end
local passed = pass(lock, queue, ARGV[1])
if not passed then
  redis.call('DEL', lock)
end
return passed == nil and 3 or 1
