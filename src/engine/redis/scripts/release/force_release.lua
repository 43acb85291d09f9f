-- Releases a name, no matter which owner holds it, and hands it off.
--
-- KEYS    1  the lock key
--         2  its queue
--         3  its fence companion
--         4  its metadata companion
-- ARGV    1  where waiters are notified, without the process: holdfast:to:, in a cluster with a hash tag of the slot
--         2  how long the fence companion outlasts the release, in ms; 0 when it goes with it
-- Answer  1 when it was held, else 0; and 2 more when another call has to hand the name off

-- GET rather than a bare DEL: a key of another type is no lock, and is not deleted.
local holder = redis.call('GET', KEYS[1])
if not holder or #holder == 37 and string.find(holder, '^%x+%-next$') then
  return 0
end
local _, more = release_one(KEYS[1], KEYS[2], KEYS[3], KEYS[4], holder, '', ARGV[1], ARGV[2])
return more and 3 or 1
