-- Makes every name another owner's, if the old one still holds all of them, and makes them last at least so much longer.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their fence companions
--         2n+1 .. 3n     their metadata companions
-- ARGV    1  the old owner's token
--         2  the new owner's
--         3  the ttl in ms
--         4  how long a fence companion lasts, in ms
--         5  the new owner's process id
--         6  its host
-- Answer  1 transferred, 0 lost (and nothing was changed)
--
-- What the new owner holds already is as good as the old one's: a retry after a lost reply. Both companions name the
-- owner, and are believed only for that one: they are written anew, and what they say stays.

local from, to, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
local n = #KEYS / 3

local holders, companions = {}, {}
for i = 1, n do
  local holder = redis.call('GET', KEYS[i])
  if holder ~= from and holder ~= to then
    return 0
  end
  -- MGET reads a companion of another type as nil.
  holders[i], companions[i] = holder, redis.call('MGET', KEYS[n + i], KEYS[n + n + i])
end

for i = 1, n do
  local record, metadata = companions[i][1], companions[i][2]
  redis.call('SET', KEYS[i], to, 'KEEPTTL')
  if record then
    local fence, token, since = string.match(record, '^(%d+) (%x+) (%d+) ')
    if token == holders[i] then
      record = string.format('%s %s %s %s %s', fence, to, since, ARGV[5], ARGV[6])
      redis.call('SET', KEYS[n + i], record, 'KEEPTTL')
    end
  end
  if metadata and string.match(metadata, '^%x+') == holders[i] then
    redis.call('SET', KEYS[n + n + i], to .. string.sub(metadata, #holders[i] + 1), 'KEEPTTL')
  end
  local left = redis.call('PTTL', KEYS[i])
  -- A lease that lasts longer already keeps its time. (-1: somebody removed the expiry.)
  if left >= 0 and left < ttl then
    redis.call('PEXPIRE', KEYS[i], ARGV[3])
    redis.call('PEXPIRE', KEYS[n + i], ARGV[4])
    redis.call('PEXPIRE', KEYS[n + n + i], ARGV[3])
  end
end
return 1
