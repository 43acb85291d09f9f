-- Lets go of a name on this node, if it is the owner's by whichever attempt, and tells whoever waits. Stands in front of the
-- scripts that do so. Answers whether the name was the owner's.
--
-- `keep`: how long the name stays busy, in ms, as text; '0': it is free at once.
--
-- The publication comes before the changes: where the ACL forbids it, the script fails before it has changed anything.
-- A released name is marked in its fence companion, for an hour at most, so that a renewal in progress does not heal it.

local MARKED_MS = 3600000

local function let_go(key, fence, metadata, owner, to, keep)
  local holder, mine = redis.call('GET', key), owner .. '.'
  if not holder or string.sub(holder, 1, #mine) ~= mine then
    return false
  end
  -- Before anything is changed: what fails has to leave the name as it was.
  local record = redis.call('GET', fence)
  redis.call('PUBLISH', to .. key, '')
  if keep ~= '0' then
    -- Busy for everybody, this owner included: no attempt has such a value.
    redis.call('SET', key, owner .. '-kept', 'PX', keep)
    redis.call('PEXPIRE', metadata, keep)
    redis.call('PEXPIRE', fence, string.format('%.0f', keep + MARKED_MS))
    return true
  end
  redis.call('DEL', key, metadata)
  -- A lock that was released as soon as it was granted has nothing told, and no renewal under way.
  local number = record and string.match(record, '^%d+')
  if number then
    redis.call('SET', fence, number .. ' ' .. owner .. '-free', 'KEEPTTL')
    if redis.call('PTTL', fence) > MARKED_MS then
      redis.call('PEXPIRE', fence, MARKED_MS)
    end
  end
  return true
end

