-- Frees a name whoever holds it, and tells whoever waits. The fence companion stays, so that the next fence is larger.
--
-- KEYS    1  the lock key
--         2  its metadata companion
-- Answer  1 when somebody held it, else 0

-- GET rather than a bare DEL: a key of another type is no lock, and is not deleted.
if not redis.call('GET', KEYS[1]) then
  return 0
end
redis.call('PUBLISH', 'holdfast:free:' .. KEYS[1], '')
redis.call('DEL', KEYS[1], KEYS[2])
return 1
