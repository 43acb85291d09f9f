-- Releases all shares of a name, and hands it off. What is only reserved for a waiter stays reserved.
--
-- KEYS, ARGV, Answer    those of release/force_release.lua, without the metadata companion. Only the first key where its slot moves

read(KEYS[1])
local is_any = false
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. ms, '+inf')) do
  if not string.find(member, '^%S+ %d+ %x+%-next$') then
    is_any = redis.call('ZREM', KEYS[1], member) == 1
  end
end
if not KEYS[2] then
  return is_any and 1 or 0
end
local _, more = release_one(KEYS[1], KEYS[2], KEYS[3], nil, nil, '', ARGV[1], ARGV[2])
return (is_any and 1 or 0) + (more and 2 or 0)
