-- The common case of release_many.lua, and placed before it: every name is held by its owner, and none has waiters.

local n = #ARGV - 1
local to, last = string.match(ARGV[1], '^(%S+) ?(.*)')
last = last == '' and '0' or last
local holders = redis.call('MGET', unpack(KEYS, 1, n))
local simple = last == '0' and redis.call('EXISTS', unpack(KEYS, n + 1, n + n)) == 0
for i = 1, n do
  simple = simple and holders[i] == string.sub(ARGV[i + 1], 1, 32)
end
if simple then
  redis.call('DEL', unpack(KEYS))
  return n
end

