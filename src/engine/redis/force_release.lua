-- Frees a name whoever holds it, and hands it on. The fence companion stays, so that the next fence is larger.
--
-- KEYS    1  the lock key
--         2  its metadata companion
--         3  its queue
-- ARGV    1  where waiters are told, without the process: holdfast:to:, in a cluster with a hash tag of the slot
-- Answer  1 when somebody held it, else 0

-- GET rather than a bare DEL: a key of another type is no lock, and is not deleted.
local holder = redis.call('GET', KEYS[1])
if not holder or #holder == 37 and string.find(holder, '^%x+%-next$') then
  return 0
end
redis.call('DEL', KEYS[2])
if not pass(KEYS[1], KEYS[3], ARGV[1]) then
  redis.call('DEL', KEYS[1])
end
return 1
