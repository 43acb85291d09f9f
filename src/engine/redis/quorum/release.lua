-- Lets go of what the owner holds of the names on this node, by whichever attempt, and tells whoever waits.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their fence companions
--         2n+1 .. 3n     their metadata companions
-- ARGV    1  the owner's token
--         2  how long the names stay busy, in ms; 0: they are free at once
--         3  how long a fence companion lasts at least, in ms; counts with 2 only
-- Answer  1 when the owner held every name, else 0
--
-- The publication comes first: where the ACL forbids it, the script fails before it has changed anything.
-- A name that was let go is marked in its fence companion, so that a renewal that is under way does not heal it.

local owner, keep = ARGV[1], tonumber(ARGV[2])
local n, mine = #KEYS / 3, owner .. '.'

local held = 0
for i = 1, n do
  local key, fence = KEYS[i], KEYS[n + i]
  local holder = redis.call('GET', key)
  if holder and string.sub(holder, 1, #mine) == mine then
    held = held + 1
    redis.call('PUBLISH', 'holdfast:free:' .. key, '')
    if keep > 0 then
      -- Busy for everybody, this owner included: no attempt has such a value.
      redis.call('SET', key, owner .. '-kept', 'PX', ARGV[2])
      redis.call('PEXPIRE', KEYS[n + n + i], ARGV[2])
      if redis.call('PTTL', fence) < tonumber(ARGV[3]) then
        redis.call('PEXPIRE', fence, ARGV[3])
      end
    else
      redis.call('DEL', key, KEYS[n + n + i])
      -- A lock that was released as soon as it was granted has nothing told, and no renewal under way.
      local record = redis.call('GET', fence)
      local number = record and string.match(record, '^%d+')
      if number then
        redis.call('SET', fence, number .. ' ' .. owner .. '-free', 'KEEPTTL')
      end
    end
  end
end
return held == n and 1 or 0
