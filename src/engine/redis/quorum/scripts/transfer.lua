-- Transfers every name on this node to another owner, if the old owner still holds all of them here, and extends them to at least
-- the ttl.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their fence companions
--         2n+1 .. 3n     their metadata companions
-- ARGV    1  the old owner token
--         2  the new owner token
--         3  the ttl in ms
--         4  the ttl of a fence companion in ms
--         5  the new owner's process id
--         6  its host
-- Answer  1 transferred, 0 lost (and nothing was changed)
--
-- A name that the new owner holds already counts as transferred: a retry after a lost reply.

local from, to, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
local n = #KEYS / 3

local tokens, attempts, companions = {}, {}, {}
for i = 1, n do
  local token, attempt = string.match(redis.call('GET', KEYS[i]) or '', '^(%x+)%.(%d+)$')
  if not token or token ~= from and token ~= to then
    return 0
  end
  -- MGET reads a companion of another type as nil.
  tokens[i], attempts[i], companions[i] = token, attempt, redis.call('MGET', KEYS[n + i], KEYS[n + n + i])
end

for i = 1, n do
  local record, metadata = companions[i][1], companions[i][2]
  redis.call('SET', KEYS[i], to .. '.' .. attempts[i], 'KEEPTTL')
  if record then
    local fence, token, since, attempt = string.match(record, '^(%d+) (%x+) (%d+) %d+:(%d+) ')
    if token == tokens[i] then
      record = string.format('%s %s %s %s:%s %s', fence, to, since, ARGV[5], attempt, ARGV[6])
      redis.call('SET', KEYS[n + i], record, 'KEEPTTL')
    end
  end
  if metadata and string.match(metadata, '^%x+') == tokens[i] then
    redis.call('SET', KEYS[n + n + i], to .. string.sub(metadata, #tokens[i] + 1), 'KEEPTTL')
  end
  local left = redis.call('PTTL', KEYS[i])
  -- A lease that already lasts longer is not changed. (-1: another tool removed the expiry.)
  if left >= 0 and left < ttl then
    redis.call('PEXPIRE', KEYS[i], ARGV[3])
    redis.call('PEXPIRE', KEYS[n + i], ARGV[4])
    redis.call('PEXPIRE', KEYS[n + n + i], ARGV[3])
  end
end
return 1
