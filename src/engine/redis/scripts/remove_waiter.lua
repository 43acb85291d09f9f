-- Takes away the place of a waiter that its process does not know: it was put there, or came back, behind the process's
-- back (a try that was carried out after it was given up, a store that restarted with older data). Hands on what was
-- handed to it. What the owner holds by now, it keeps.
--
-- KEYS    1  the lock key
--         2  its queue
-- ARGV    1  where waiters are told, without the process: holdfast:to:, in a cluster with a hash tag of the slot
--         2  the waiter's member of the queue
-- Answer  1 when the name was kept for it, else 0; and 2 more when another call has to hand the name on

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
