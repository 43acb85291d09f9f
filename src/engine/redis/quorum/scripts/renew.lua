-- Extends every name on this node to at least the ttl, if the owner still holds all of them here.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their fence companions
--         2n+1 .. 3n     their metadata companions
-- ARGV    1  the owner token
--         2  the ttl in ms
--         3  the ttl of a fence companion in ms
-- Answer  1 extended
--         0 lost: a name has another holder, or was released (and nothing was changed)
--         2 missing: the node does not have some of the names, although they were neither released nor acquired by another
--           owner: it was down or lost its data, and may be healed (nothing was changed)

local owner, ttl = ARGV[1], tonumber(ARGV[2])
local n = #KEYS / 3

local held = 0
for i = 1, n do
  local holder = redis.call('GET', KEYS[i])
  if holder then
    if string.match(holder, '^(%x+)%.%d+$') ~= owner then
      return 0
    end
    held = held + 1
  elseif string.match(redis.call('GET', KEYS[n + i]) or '', '^%d+ (%S+)') == owner .. '-free' then
    return 0
  end
end
if held < n then
  return 2
end
for i = 1, n do
  local left = redis.call('PTTL', KEYS[i])
  -- A lease that already lasts longer is not changed, so that a late renewal does not shorten it. (-1: another tool removed the
  -- expiry.)
  if left >= 0 and left < ttl then
    redis.call('PEXPIRE', KEYS[i], ARGV[2])
    redis.call('PEXPIRE', KEYS[n + i], ARGV[3])
    redis.call('PEXPIRE', KEYS[n + n + i], ARGV[2])
  end
end
return 1
