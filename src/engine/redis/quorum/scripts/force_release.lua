-- Releases a name on this node, no matter which owner holds it, and notifies waiters. The fence companion stays and is marked,
-- for an hour at most, so that a renewal in progress does not heal the lock.
--
-- KEYS    1  the lock key
--         2  its fence companion
--         3  its metadata companion
-- Answer  1 if the name was held, else 0

-- GET before DEL: a key of another type is no lock, and is not deleted.
local holder = redis.call('GET', KEYS[1])
if not holder then
  return 0
end
local number, token = string.match(redis.call('GET', KEYS[2]) or '', '^(%d+) (%x+) ')
redis.call('PUBLISH', 'holdfast:free:' .. KEYS[1], '')
redis.call('DEL', KEYS[1], KEYS[3])
if token then
  redis.call('SET', KEYS[2], number .. ' ' .. token .. '-free', 'KEEPTTL')
  if redis.call('PTTL', KEYS[2]) > 3600000 then
    redis.call('PEXPIRE', KEYS[2], 3600000)
  end
end
return 1
