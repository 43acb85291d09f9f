-- Transfers every name to another owner, if the old one still holds all of them, and extends the lease to at least its ttl. Also
-- for a node of a quorum.
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
--         7  given when the caller calls again if a record is not stored yet
-- Answer  1 transferred, 0 lost (and nothing was changed); 2 a record is not stored yet (and nothing was changed)
--
-- A name that the new owner already holds counts, too: a retry after a lost reply. Both companion keys name the owner, and
-- count only for that one: they are rewritten with the new owner, and keep the rest of their content. On a node of a quorum the
-- lock key and the record contain the round of the grant (`.<round>` and `:<round>`), which stays the same.

local from, to, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
local n = #KEYS / 3

local holders, rounds, companions = {}, {}, {}
for i = 1, n do
  local holder, round = string.match(redis.call('GET', KEYS[i]) or '', '^(%x+)(%.?%d*)$')
  if holder ~= from and holder ~= to then
    return 0
  end
  -- MGET reads a key of another type as nil.
  holders[i], rounds[i], companions[i] = holder, round, redis.call('MGET', KEYS[n + i], KEYS[n + n + i])
  if ARGV[7] and not string.find(companions[i][1] or '', holder, 1, true) then
    return 2
  end
end

for i = 1, n do
  local record, metadata = companions[i][1], companions[i][2]
  redis.call('SET', KEYS[i], to .. rounds[i], 'KEEPTTL')
  if record then
    local fence, token, since, round = string.match(record, '^(%d+) (%x+) (%d+) %d+(:?%d*) ')
    if token == holders[i] then
      record = string.format('%s %s %s %s%s %s', fence, to, since, ARGV[5], round, ARGV[6])
      redis.call('SET', KEYS[n + i], record, 'KEEPTTL')
    end
  end
  if metadata and string.match(metadata, '^%x+') == holders[i] then
    redis.call('SET', KEYS[n + n + i], to .. string.sub(metadata, #holders[i] + 1), 'KEEPTTL')
  end
  local left = redis.call('PTTL', KEYS[i])
  -- A lease that already lasts longer keeps its time. (-1: the key has no expiry any more.)
  if left >= 0 and left < ttl then
    redis.call('PEXPIRE', KEYS[i], ARGV[3])
    redis.call('PEXPIRE', KEYS[n + i], ARGV[4])
    redis.call('PEXPIRE', KEYS[n + n + i], ARGV[3])
  end
end
return 1
