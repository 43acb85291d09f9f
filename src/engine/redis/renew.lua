-- Makes every name last at least so much longer, if the owner still holds all of them.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their fence companions
--         2n+1 .. 3n     their metadata companions
-- ARGV    1  the owner's token
--         2  the ttl in ms
--         3  how long a fence companion lasts, in ms
-- Answer  1 extended, 0 lost (and nothing was changed)

local ttl = tonumber(ARGV[2])
local n = #KEYS / 3

for i = 1, n do
  if redis.call('GET', KEYS[i]) ~= ARGV[1] then
    return 0
  end
end
for i = 1, n do
  local left = redis.call('PTTL', KEYS[i])
  -- A lease that lasts longer already keeps its time, so that a renewal that comes late takes nothing away. (-1: somebody
  -- removed the expiry.)
  if left >= 0 and left < ttl then
    redis.call('PEXPIRE', KEYS[i], ARGV[2])
    redis.call('PEXPIRE', KEYS[n + i], ARGV[3])
    redis.call('PEXPIRE', KEYS[n + n + i], ARGV[2])
  end
end
return 1
