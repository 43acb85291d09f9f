-- Frees a name whoever holds it, and hands it on.
--
-- KEYS    1  the lock key
--         2  its queue
--         3  its metadata companion
--         4  its fence companion, unless that is to outlast it (in a cluster)
-- ARGV    1  where waiters are told, without the process: holdfast:to:, in a cluster with a hash tag of the slot
-- Answer  1 when somebody held it, else 0

-- GET rather than a bare DEL: a key of another type is no lock, and is not deleted.
local holder = redis.call('GET', KEYS[1])
if not holder or #holder == 37 and string.find(holder, '^%x+%-next$') then
  return 0
end
redis.call('DEL', KEYS[3], KEYS[4] or KEYS[3])
if not pass(KEYS[1], KEYS[2], ARGV[1]) then
  redis.call('DEL', KEYS[1])
end
return 1
