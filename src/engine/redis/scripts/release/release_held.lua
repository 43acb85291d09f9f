-- The common case of release.lua, and placed before it: one name that the owner holds and that has no waiters.

local owner, fences_last, keep = ARGV[1], ARGV[5], ARGV[6]

if ARGV[2] == '1' and not keep and redis.call('GET', KEYS[1]) == owner and redis.call('EXISTS', KEYS[2]) == 0 then
  if fences_last == '0' then
    redis.call('DEL', unpack(KEYS))
  else
    redis.call('DEL', KEYS[1], KEYS[4] or KEYS[1])
    -- The companion may have been written for a long ttl.
    if redis.call('PTTL', KEYS[3]) > fences_last + 3600000 then
      redis.call('PEXPIRE', KEYS[3], fences_last)
    end
  end
  return 1
end

