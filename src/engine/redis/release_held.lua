-- The common case of release.lua, which it stands in front of: one name, held, nobody waits for it.

local owner = ARGV[1]

if #KEYS == 3 and redis.call('GET', KEYS[1]) == owner and redis.call('EXISTS', KEYS[3]) == 0 then
  redis.call('DEL', KEYS[1], KEYS[2])
  return 1
end

