-- Reads the holder of a name.
--
-- KEYS    1  the lock key
--         2  its fence companion
--         3  its metadata companion
-- Answer  nil when it is free, else { the lock's value, its PTTL, fence companion or nil, metadata companion or nil }

local value = redis.call('GET', KEYS[1])
-- A reserved name has no holder yet.
if not value or #value == 37 and string.find(value, '^%x+%-next$') then
  return false
end
-- MGET reads a key of another type as nil.
local companions = redis.call('MGET', KEYS[2], KEYS[3])
return { value, redis.call('PTTL', KEYS[1]), companions[1], companions[2] }
