-- Extends shares to at least their ttl from now, each of them if its owner still holds it.
--
-- KEYS    1 .. n         the sets of the holders, one for each share
--         n+1 .. 2n      in a cluster their fence companions, unless the slot moves
-- ARGV    those of renew.lua
-- Answer  that of renew.lua

local kept, HOUR, n = tonumber(ARGV[1]), 3600000, (#ARGV - 1) / 3
local answers, seen = {}, {}
ms = math.floor(microseconds() / 1000)
for i = 1, n do
  local key, owner, ttl = KEYS[i], ARGV[3 * i - 1], tonumber(ARGV[3 * i])
  if not seen[key] then
    seen[key] = {}
    for _, member in ipairs(redis.call('ZRANGEBYSCORE', key, '(' .. ms, '+inf')) do
      seen[key][string.match(member, '^%S+ %d+ (%S+)')] = member
    end
  end
  set = key
  local member = seen[key][owner]
  local left = member and write(member, ttl) or math.huge
  if KEYS[n + i] and math.floor((ms + left - 1000) / HOUR) < math.floor((ms + ttl) / HOUR) then
    redis.call('PEXPIRE', KEYS[n + i], ttl + kept)
  end
  answers[i] = member and '1' or '0'
end
return table.concat(answers)
