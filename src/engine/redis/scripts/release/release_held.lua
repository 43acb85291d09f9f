-- The common case of release.lua, and placed before it: every name is held by its owner, and none has waiters.

local holders = redis.call('MGET', unpack(KEYS, 1, n))
local simple = not keep and redis.call('EXISTS', unpack(KEYS, n + 1, n + n)) == 0
for i = 1, n do
  simple = simple and holders[i] == string.sub(ARGV[i + 1], 1, 32)
end
if simple and last == '0' then
  redis.call('DEL', unpack(KEYS))
elseif simple then
  redis.call('DEL', unpack(KEYS, 1, n))
  for i = n + n + 1, #KEYS do
    if i > n + n + n then
      redis.call('DEL', KEYS[i])
    elseif redis.call('PTTL', KEYS[i]) > last + 3600000 then
      -- The companion may have been written for a long ttl.
      redis.call('PEXPIRE', KEYS[i], last)
    end
  end
end
if simple then
  return n
end

