-- Releases all shares of a name, and hands it off. What is only reserved for a waiter stays reserved.
--
-- KEYS, ARGV, Answer    those of release/force_release.lua, without the metadata companion. Only the first key where its slot moves

read(KEYS[1])
local held = {}
for owner, member in pairs(members) do
  if not string.find(owner, '-next', 1, true) then
    held[#held + 1] = member
  end
end
for i = 1, #held, 1000 do
  redis.call('ZREM', KEYS[1], unpack(held, i, math.min(i + 999, #held)))
end
local _, more = release_one(KEYS[1], KEYS[2], KEYS[3], nil, 'none', '', ARGV[1], ARGV[2])
return (#held > 0 and 1 or 0) + (more and 2 or 0)
